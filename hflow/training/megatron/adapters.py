"""Low-rank adapters of megatron's linear layers, divided over tensor ranks as the matrices beside them.

They compute what `models/adapter.py` describes.

Megatron computes q, k and v, or gate and up, as one matrix. Each HF matrix has an adapter of its own all the
same, as with peft, so that results and files are those of the torch backend.

Only the r numbers of a token between the two matrices are exchanged. Where tensor ranks divide the outputs of
a layer, each has all of A and its rows of B; where they divide the inputs, each has its columns of A and all
of B. The embedding is a layer whose inputs, tokens, are divided. Magnitudes are divided as the rows of B;
where ranks divide the inputs, lengths of rows are sums over them. With sequence parallelism, a matrix that
all ranks have computes a part of the tokens on each, and its gradients are summed with those of norms.

Experts and the output matrix exchange nothing, as each tensor rank computes a term of what is summed anyway:
of the outputs of experts, and of the gradient of the last hidden states. So do gradients of the matrices that
all ranks have.

Axes: U tokens, those of this rank with sequence parallelism; I inputs and O outputs of a layer on this rank;
r rank of the adapters; n adapters of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import embedding, linear
from typing_extensions import override

from hflow.models.adapter import row_lengths
from hflow.models.expert_adapters import ExpertAdapter
from hflow.shapes.model_shape import EMBEDDING, OUTPUT, ModelShape
from hflow.training.megatron.hf_mapping import (
    AdaptedLinear,
    ShardPosition,
    adapted_experts,
    adapted_linears,
)
from hflow.training.megatron.latent_attention import WholeLinear
from hflow.training.megatron.layers import sum_gradient
from hflow.types.kernels import LayerKernels

_MAGNITUDE = "_magnitude"
"""End of the names of magnitudes, after that of an HF module."""


class OutputSpans(NamedTuple):
    """The places of adapters' outputs in those of a layer, which consist of equal blocks."""

    num_blocks: int
    in_block: list[tuple[int, int]]
    """`[start, stop)` of each adapter in every block."""

    def views(self, output: Tensor) -> list[Tensor]:
        """Return the part of each adapter in an output `[U, 1, O]`, as a view `[U, blocks, size]`."""
        blocks = output.squeeze(1).unflatten(-1, (self.num_blocks, -1))
        return [blocks[..., start:stop] for start, stop in self.in_block]


class LinearAdapters(nn.Module):
    """The adapters of a linear layer, which computes one or several HF matrices."""

    is_divided = True
    """Whether tensor ranks divide the layer."""

    def __init__(
        self,
        of: AdaptedLinear,
        scale: float,
        config: TransformerConfig,
        tp_group: ProcessGroup,
        copies: ProcessGroup | None,
    ) -> None:
        """Allocate weights without initialising them.

        Args:
            copies: the tensor ranks that hold the same key-value head; None if each head is on one of them.
        """
        super().__init__()
        self.scale, self.tp_group, self.copies = scale, tp_group, copies
        self.divides_inputs, self.spans = of.divides_inputs, OutputSpans(of.num_blocks, [])
        self.hf_modules: list[str] = []
        """The HF modules that have adapters."""
        self.sequence_parallel = config.sequence_parallel
        self._disable_adapters = False  # as peft's modules have it
        for row in of.parameters:
            name = row.name.rpartition(".")[2]  # such as q_proj_A
            weight: Any = nn.Parameter(torch.empty(row.shape, dtype=config.params_dtype))
            if self.is_divided and name.endswith("_A") == of.divides_inputs:  # tensor ranks divide it
                set_tensor_model_parallel_attributes(weight, True, row.parts[0].axis, 1)
                weight.shared = row.is_copy  # excludes it from gradient norms
            else:
                weight.sequence_parallel = config.sequence_parallel
            self.register_parameter(name, weight)
        start = 0
        for module, size in of.outputs:
            stop = start + size // of.num_blocks
            if f"{module}_A" in self._parameters:
                self.hf_modules.append(module)
                self.spans.in_block.append((start, stop))
            start = stop
        self.has_magnitudes = any(name.endswith(_MAGNITUDE) for name in self._parameters)

    def forward(self, x: Tensor, output: Tensor, layer: Any, bias: Tensor | None) -> Tensor:
        """Return the output `[U, 1, O]` of the layer with its adapters.

        Args:
            x: the layer's input, `[U, 1, I]`.
            output: the layer's output without adapters, which may be overwritten.
            layer: has the matrices `weight`, `[O, I]`.
            bias: the bias in the output, `[O]`; None: there is none, or it is still to add.
        """
        if self._disable_adapters:
            return output
        adapted = self._add_low_rank(x, output)
        if not self.has_magnitudes:
            return adapted
        factor = self._factor(layer.weight)
        scaled = factor * adapted
        return scaled if bias is None else scaled + (1 - factor) * bias

    def _factor(self, weight: Tensor) -> Tensor:
        """Return by what each output is multiplied, `[O]`: m / |V|, or 1 where there is no adapter."""
        lengths = self._lengths(weight)
        factor = weight.new_ones(len(weight)).view(self.spans.num_blocks, -1)
        for module, (start, stop) in zip(self.hf_modules, self.spans.in_block, strict=True):
            ratio = self._shared(f"{module}{_MAGNITUDE}") / lengths[module]
            factor[:, start:stop] = ratio.view(self.spans.num_blocks, -1)
        return factor.flatten()

    @torch.no_grad()
    def set_magnitudes(self, weight: Tensor) -> None:
        """Set the magnitudes to the lengths of rows of `weight`, `[O, I]`: while B is 0, this gives W x."""
        for module, lengths in self._lengths(weight).items():
            self.get_parameter(f"{module}{_MAGNITUDE}").copy_(lengths)

    def _lengths(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the lengths of the rows of each HF module with its adapter. May be a collective."""
        blocks = weight.detach().unflatten(0, (self.spans.num_blocks, -1))
        column_ranks = self.tp_group if self.divides_inputs and self.tp_group.size() > 1 else None
        lengths = {}
        for module, (start, stop) in zip(self.hf_modules, self.spans.in_block, strict=True):
            rows = blocks[:, start:stop].flatten(0, 1)
            a, b = (self.get_parameter(f"{module}_{x}") for x in "AB")
            lengths[module] = row_lengths(rows, a, b, self.scale, column_ranks)
        return lengths

    def _add_low_rank(self, x: Tensor, output: Tensor) -> Tensor:
        """Add to a layer's output that of the adapters, without magnitudes."""
        low = self._exchange(self._multiply_a(x) * self.scale)
        matrices = [self._shared(f"{module}_B") for module in self.hf_modules]
        if self.divides_inputs:  # a single matrix; the output may be a view, which cannot be overwritten
            return output + linear(low, *matrices).unsqueeze(1)
        return _add_products(output, low, self.spans, *matrices)

    def _multiply_a(self, x: Tensor) -> Tensor:
        """Return the numbers between the matrices, `[U, n r]`, as far as this rank's inputs make them."""
        return linear(x.squeeze(1), torch.cat([self.get_parameter(f"{x}_A") for x in self.hf_modules]))

    def _exchange(self, low: Tensor) -> Tensor:
        """Return the numbers between the matrices, `[U, n r]`, of the tokens that the second ones need.

        Gradients go the other way.
        """
        if self.divides_inputs:
            exchange = (
                reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
        else:
            exchange = (
                gather_from_sequence_parallel_region
                if self.sequence_parallel
                else copy_to_tensor_model_parallel_region
            )
        exchanged: Tensor = exchange(low, group=self.tp_group)
        return exchanged

    def _shared(self, name: str) -> Tensor:
        """Return B or magnitudes, whose gradient is summed over the ranks that have the same rows."""
        weight = self.get_parameter(name)
        if self.copies is None or not name.startswith(("k_proj", "v_proj")):
            return weight
        return sum_gradient(weight, self.copies)


class WholeAdapters(LinearAdapters):
    """The adapters of a layer that all tensor ranks have whole, who exchange nothing (latent attention)."""

    is_divided = False

    @override
    def _exchange(self, low: Tensor) -> Tensor:
        return low


class EmbeddingAdapter(LinearAdapters):
    """The adapter of an embedding. Each tensor rank has the columns of A of its tokens."""

    def __init__(self, of: AdaptedLinear, *others: Any) -> None:
        """Allocate weights without initialising them; the other arguments are those of `LinearAdapters`."""
        super().__init__(of, *others)
        self._first = of.parameters[0].parts[0].span[0]

    def _multiply_a(self, x: Tensor) -> Tensor:
        """Look up the columns of A of tokens `[1, U]`, of all tensor ranks' U: `[U, r]`."""
        columns = self.get_parameter(f"{EMBEDDING}_A").T
        index = x[0] - self._first
        is_here = (index >= 0) & (index < len(columns))
        return embedding(index.clamp(0, len(columns) - 1), columns) * is_here[:, None]


class OutputMatrixAdapter(LinearAdapters):
    """The adapter of an output matrix, whose logits are computed elsewhere."""

    def factors(self, hidden: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return the r numbers of hidden states `[N, D]`, `[N, r]`, and this rank's rows of B, `[V', r]`.

        None if the adapter is off.
        """
        if self._disable_adapters:
            return None, None
        a: Tensor = self.get_parameter(f"{OUTPUT}_A")
        if not self.sequence_parallel and self.tp_group.size() > 1:
            a = sum_gradient(a, self.tp_group)
        return linear(hidden, a) * self.scale, self.get_parameter(f"{OUTPUT}_B")


def add_adapters(
    stage: nn.Module, shape: ModelShape, position: ShardPosition, kernels: LayerKernels, scale: float
) -> None:
    """Add adapters without values to the layers of a stage, whose outputs they change from now on.

    `shape` has the sizes of the model's adapters, and `scale` is the factor of their output.
    """
    config: Any = stage.config
    for of in adapted_linears(shape, position, kernels):
        layer: Any = stage.get_submodule(of.name)
        others = scale, config, layer.tp_group, getattr(layer, "copies", None)
        if isinstance(layer, VocabParallelEmbedding):
            layer.adapters = EmbeddingAdapter(of, *others)
            stage.get_submodule("embedding").register_forward_hook(_add_to_embedded, with_kwargs=True)
        elif of.name == "output_layer":
            layer.adapters = OutputMatrixAdapter(of, *others)
        else:
            kind = WholeAdapters if isinstance(layer, WholeLinear) else LinearAdapters
            layer.adapters = kind(of, *others)
            layer.register_forward_hook(_add_output)
    for module, name, parameters in adapted_experts(shape, position, kernels):
        a, b = (torch.empty(row.shape, dtype=config.params_dtype) for row in parameters)
        adapter: Any = ExpertAdapter(a, b, scale)
        stage.get_submodule(module).get_submodule("adapters").add_module(name, adapter)
        for row, weight in zip(parameters, adapter.parameters(), strict=True):
            weight.allreduce = position.num_expert == 1  # whether all data ranks have it
            if axis := row.parts[0].axis:  # tensor ranks divide it
                set_tensor_model_parallel_attributes(weight, True, axis, 1)
            else:
                weight.sequence_parallel = config.sequence_parallel


def _add_output(layer: Any, args: tuple[Tensor, ...], result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Return a layer's result, an output and a bias still to add, with the adapters' output added."""
    output, bias = result
    return layer.adapters(args[0], output, layer, layer.bias if bias is None else None), bias


def _add_to_embedded(layer: Any, args: object, kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
    """Return embedded tokens with the output of the embedding's adapter added."""
    lookup = layer.word_embeddings
    embedded: Tensor = lookup.adapters(kwargs["input_ids"], output, lookup, None)
    return embedded


def set_magnitudes(stage: nn.Module) -> None:
    """Set the magnitudes of a stage's adapters, if they have any, once its weights have values.

    May be a collective over the tensor ranks.
    """
    for module in stage.modules():
        layer: Any = module
        adapters = layer._modules.get("adapters")
        if isinstance(adapters, LinearAdapters) and adapters.has_magnitudes:
            adapters.set_magnitudes(layer.weight)


class _AddProducts(torch.autograd.Function):
    """Adds the products of adapters to their parts of an output, one after the other.

    All together would take the memory of the output, and as much again in the order of its blocks.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, low: Tensor, spans: OutputSpans, *matrices: Tensor) -> Tensor:
        ctx.spans = spans
        ctx.mark_dirty(output)
        ctx.save_for_backward(low, *matrices)
        parts, rows = spans.views(output), low.chunk(len(matrices), dim=-1)
        for part, row, matrix in zip(parts, rows, matrices, strict=True):
            part.add_(linear(row, matrix).view_as(part))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        low, *matrices = ctx.saved_tensors
        of_low = torch.empty_like(low)
        of_matrices = []
        rows, of_rows = (x.chunk(len(matrices), dim=-1) for x in (low, of_low))
        for part, row, of_row, matrix in zip(ctx.spans.views(grad), rows, of_rows, matrices, strict=True):
            of_product = part.flatten(-2)
            of_row.copy_(of_product @ matrix)
            of_matrices.append(of_product.t() @ row)
        return grad, of_low, None, *of_matrices


_add_products: Callable[..., Tensor] = _AddProducts.apply
