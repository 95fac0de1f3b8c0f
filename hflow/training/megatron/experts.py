"""The router and the experts of a mixture-of-experts layer, computed as transformers does.

Megatron's `MoELayer` calls both, and sends tokens to the ranks that have their experts in between. Its own
router and experts are not used: its fast experts need Transformer Engine, and the losses of its router
depend on micro-batches.

Axes: U' tokens of this rank, D hidden, N experts of the model, n of this rank, R rows (tokens that were sent
to this rank, once for each of its experts), F rows of an expert, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear, one_hot
from torch.utils.checkpoint import checkpoint

from hflow.models.expert_balance import BalancedTokens
from hflow.models.expert_replay import ReplayedExperts, choose_experts
from hflow.shapes.model_shape import ModelShape
from hflow.training.megatron.layers import gated_silu
from hflow.training.megatron.supported_models import GateClamp, Routing

_ALIGNMENT = 16
"""Rows of the matrices of a grouped product begin at multiples of this many bytes."""


class Router(nn.Module):
    """Chooses each token's experts and their weights."""

    def __init__(
        self,
        model: ModelShape,
        routing: Routing,
        *,
        config: Any,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Allocate weights without initialising them. Megatron passes `pg_collection`, which is not used."""
        super().__init__()
        assert model.experts is not None
        self.per_token, self.routing = model.experts.per_token, routing
        self._layers = [layer for layer in range(model.num_layers) if model.has_experts(layer)]
        self.layer = 0
        """Index among the layers with experts."""
        self.replayed: ReplayedExperts | None = None
        """What the next forward is to choose for its U' tokens; None: it chooses itself."""
        self.balanced: BalancedTokens | None = None
        """What the next forward is to count and balance; None: nothing."""
        self.weight = nn.Parameter(
            torch.empty(model.experts.num, config.hidden_size, dtype=config.params_dtype)
        )
        # With sequence parallelism each tensor rank has a part of the tokens, so gradients must be summed.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.bias: Any = None
        """`[N]`: what is added to logits."""
        self.score_bias: nn.Parameter | None = None
        """fp32 `[N]`: what is added to scores before experts are chosen. It has no gradient."""
        if model.experts.has_bias:
            self.bias = nn.Parameter(torch.empty(model.experts.num, dtype=config.params_dtype))
            self.bias.sequence_parallel = config.sequence_parallel
        elif model.experts.has_router_bias:
            self.score_bias = nn.Parameter(torch.empty(model.experts.num), requires_grad=False)

    def forward(self, hidden: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """Route `[U', 1, D]`: return weights `[U', N]`, 0 for other experts, and bool `[U', N]`."""
        rows, routing = hidden.flatten(0, 1), self.routing
        if routing.in_fp32:
            logits = linear(rows.float(), self.weight.float())
        else:
            logits = linear(rows, self.weight, self.bias)
        scores = logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(-1, dtype=torch.float32)
        index = choose_experts(self._ranks(scores.detach()), self.per_token, self.replayed, self.layer)
        chosen = scores.gather(-1, index)
        if routing.normalizes:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        chosen = chosen * routing.scaling
        if self.balanced is not None:
            chosen = self.balanced.balance(self.layer, chosen, logits, index, routing.score)
        self.replayed = self.balanced = None
        weights = rows.new_zeros(logits.shape).scatter(1, index, chosen.to(rows.dtype))
        is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, index, value=True)
        return weights, is_chosen

    def _ranks(self, scores: Tensor) -> Tensor:
        """Return the scores that rank experts, `[U', N]`: minus infinity in groups that are left out."""
        routing = self.routing
        ranks = scores if self.score_bias is None else scores + self.score_bias
        if routing.num_groups == 1:
            return ranks
        groups = ranks.unflatten(-1, (routing.num_groups, -1))
        kept = groups.topk(routing.best_of_group).values.sum(-1).topk(routing.num_kept_groups).indices
        is_left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, kept, value=False)
        kept_ranks: Tensor = groups.masked_fill(is_left_out[..., None], float("-inf")).flatten(-2)
        return kept_ranks

    def set_layer_number(self, layer_number: int) -> None:
        """Set the layer of the model, counted from 1."""
        self.layer = self._layers.index(layer_number - 1)


def routers_of(block: nn.Module) -> list[Router]:
    """Return the routers of a stage in the order of its layers."""
    return [module for module in block.modules() if isinstance(module, Router)]


def inform_routers(block: nn.Module) -> None:
    """Let the routers of megatron's layers choose, and balance, what `PackedInputs` says.

    Each layer hands it to its router when it is called, also when it is computed again in a backward pass.
    """
    for layer in block.modules():
        if isinstance(mlp := getattr(layer, "mlp", None), MoELayer):
            layer.register_forward_pre_hook(partial(_hand_over, mlp.router), with_kwargs=True)


def _hand_over(router: Router, layer: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
    inputs = kwargs["packed_seq_params"]
    router.replayed, router.balanced = inputs.replayed, inputs.balanced


class GroupedExperts(nn.Module):
    """The experts of a rank, whose products with their tokens are computed together.

    Tensor ranks divide the rows F of every expert. The layer's token dispatcher sums over them.
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: ProcessGroupCollection) -> None:
        """Allocate weights without initialising them."""
        super().__init__()
        rows = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        is_divided = pg_collection.ep.size() > 1

        def parameter(*shape: int, split_axis: int) -> nn.Parameter:
            made = nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(made, True, split_axis, 1)
            made.allreduce = not is_divided  # type: ignore[attr-defined]  # whether all data ranks have it
            return made

        self.gate_up = parameter(num_local_experts, 2 * rows, config.hidden_size, split_axis=1)
        self.down = parameter(num_local_experts, config.hidden_size, rows, split_axis=2)
        self.adapters = nn.ModuleDict()
        """Name of a parameter -> its `ExpertAdapter`, if it has one."""

    def forward(self, tokens: Tensor, per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Compute `[R, D]` -> `[R, D]`; the second result, a bias still to add, is None.

        Args:
            tokens: the rows of the first expert, then those of the second, and so on.
            per_expert: int64 `[n]`, how many rows each expert has.
            weights: `[R]`, by which results are multiplied.
        """
        ends = per_expert.cumsum(0).to(tokens.device, torch.int32, non_blocking=True)
        multiply = partial(_each_linear, per_expert=per_expert, ends=ends)
        activated = gated_silu(self._adapted(tokens, "gate_up", multiply), weights)
        return self._adapted(activated, "down", multiply), None

    def _adapted(self, x: Tensor, name: str, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Multiply the rows of each expert by its matrix with its adapter, if there is one.

        What tensor ranks compute with an adapter adds up to its output, as with the matrix beside it.
        """
        output = multiply(x, getattr(self, name))
        return self.adapters[name](x, output, multiply) if name in self.adapters else output


class BiasedExperts(nn.Module):
    """Experts with biases and clamped gates (gpt-oss), whose parameters are those of transformers.

    Columns of gates and ups alternate. Tensor ranks divide them, and the rows of downs.
    """

    def __init__(
        self, num_local_experts: int, config: Any, pg_collection: ProcessGroupCollection, *, clamp: GateClamp
    ) -> None:
        """Allocate weights without initialising them; `clamp` is the gate, and others are megatron's."""
        super().__init__()
        self.num_ranks, self.clamp = pg_collection.expt_tp.size(), clamp
        rows, hidden = config.moe_ffn_hidden_size // self.num_ranks, config.hidden_size
        is_divided = pg_collection.ep.size() > 1

        def parameter(*shape: int, split_axis: int | None) -> Any:
            made: Any = nn.Parameter(torch.empty(num_local_experts, *shape, dtype=config.params_dtype))
            made.allreduce = not is_divided  # whether all data ranks have it
            if split_axis is None:
                made.sequence_parallel = config.sequence_parallel
            else:
                set_tensor_model_parallel_attributes(made, True, split_axis, 1)
            return made

        self.gate_up_proj = parameter(hidden, 2 * rows, split_axis=2)
        self.gate_up_proj_bias = parameter(2 * rows, split_axis=1)
        self.down_proj = parameter(rows, hidden, split_axis=1)
        self.down_proj_bias = parameter(hidden, split_axis=None)

    def forward(self, tokens: Tensor, per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Compute `[R, D]` -> `[R, D]`, as `GroupedExperts.forward`.

        Each tensor rank adds its share of the biases of downs, over which the token dispatcher sums.
        """
        ends = per_expert.cumsum(0).to(tokens.device, torch.int32, non_blocking=True)
        rows = torch.arange(len(tokens), device=tokens.device)
        expert = torch.searchsorted(ends, rows, right=True)
        is_of = one_hot(expert, len(ends)).to(tokens.dtype)  # to add biases, in a fixed order
        gate_up = _each_linear(tokens, self.gate_up_proj.transpose(1, 2), per_expert, ends)
        gate_up = torch.addmm(gate_up, is_of, self.gate_up_proj_bias)
        activated: Any = checkpoint(  # keeps the input alone
            *(_clamped_gate, gate_up, weights, self.clamp), use_reentrant=False, preserve_rng_state=False
        )
        out = _each_linear(activated, self.down_proj.transpose(1, 2), per_expert, ends)
        return torch.addmm(out, is_of * (weights / self.num_ranks)[:, None], self.down_proj_bias), None


def _clamped_gate(x: Tensor, weights: Tensor, clamp: GateClamp) -> Tensor:
    """Return `[R, F]` of `[R, 2 F]`, each row multiplied by its weight, `[R]`."""
    gate, up = x[..., 0::2].clamp(max=clamp.limit), x[..., 1::2].clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * torch.sigmoid(clamp.alpha * gate)) * weights[:, None]


def forget_routing(module: nn.Module) -> None:
    """Drop what the dispatchers of tokens keep of the last forward pass.

    The weights of a token's experts have a graph, which holds the inputs of recomputed layers and their
    gradients.
    """
    for layer in module.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher.probs = None


def _each_linear(x: Tensor, weight: Tensor, per_expert: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix: `[R, I]`, `[n, O, I]` -> `[R, O]`.

    The rows are sorted by expert. `per_expert`, int64 `[n]` on the host, says how many rows each has, and
    `ends`, int32 `[n]` on the device, the row after its last.
    """
    if not len(x):
        return linear(x, weight[0])  # takes part in the backward pass of the exchange of tokens
    if _has_grouped_product(weight):
        product: Tensor = grouped_mm(x, weight.transpose(1, 2), offs=ends)
        return product
    parts = zip(x.split(per_expert.tolist()), weight, strict=True)  # host: the dispatcher has copied it
    return torch.cat([linear(rows, matrix) for rows, matrix in parts])


def _has_grouped_product(weight: Tensor) -> bool:
    """Return whether torch multiplies the rows of all experts in one kernel. On GPUs it does so in bf16."""
    is_aligned = all(size * weight.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])
    return is_aligned and (weight.device.type == "cpu" or weight.dtype == torch.bfloat16)
