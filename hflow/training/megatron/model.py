"""One rank's stage of a model: megatron's GPT model of its layers and tensor shard, with its weights.

Axes: U computed tokens, U' the same padded for sequence parallelism and FP8, N rows that need logits, D
hidden, V' padded vocabulary, T tensor ranks, E head size.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as megatron_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
)
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from hflow.base.errors import BackendError
from hflow.models.adapter import share_parameters
from hflow.models.device import local_device
from hflow.models.drawn_weights import parameters_on_meta
from hflow.models.dtypes import DTYPES
from hflow.models.expert_balance import BalancedTokens
from hflow.models.expert_replay import ReplayedExperts
from hflow.models.heads import ScalarHead
from hflow.models.hf_config import read_config, translate_errors
from hflow.models.packed_attention import PackedLayout
from hflow.models.settings import ModelSettings
from hflow.shapes.model_shape import ModelShape, adapted_shape, adapter_targets
from hflow.training.fsdp.build import HEADS, check_choice
from hflow.training.loop.kept_sets import KeptSets
from hflow.training.loop.logprobs import MatrixLogits, OutputMatrix
from hflow.training.megatron.adapters import OutputMatrixAdapter, add_adapters, set_magnitudes
from hflow.training.megatron.attention import PackedInputs, Rotary, rotaries_of
from hflow.training.megatron.checkpoint_reader import load_parameters, open_weights
from hflow.training.megatron.config import block_spec, transformer_config
from hflow.training.megatron.context_parallel import RowDivision
from hflow.training.megatron.experts import inform_routers
from hflow.training.megatron.hf_mapping import (
    MappedParameter,
    ShardPosition,
    padded_vocab_size,
    rank_parameters,
)
from hflow.training.megatron.parallel_state import ParallelState
from hflow.training.megatron.supported_models import LayerMath, supported_shape
from hflow.types.kernels import FP8_NEEDS, Fp8Recipe, LayerKernels

_RNG = "model-parallel-rng"
"""Name of megatron's random state for dropout in sharded regions, which must exist without dropout too."""


@dataclass(frozen=True)
class Stage:
    """A rank's part of a model and its inputs and outputs."""

    module: GPTModel
    """Called with `inputs(...)`. Returns the input of the next stage. The last stage returns hidden states
    `[U, D]`, the same on all tensor ranks, for `logits` or the scalar `output_layer`. With context
    parallelism, U is the number of the rank's own rows, everywhere in this module."""
    config: TransformerConfig
    hf_config: PreTrainedConfig
    shape: ModelShape
    trained_shape: ModelShape
    """The part of the model that training changes: its adapters, with a scalar head, if it has any."""
    parallel: ParallelState
    dtype: torch.dtype
    """dtype of the forward pass and the weights; a scalar head is in fp32."""
    device: torch.device
    parameters: tuple[MappedParameter, ...]
    """The parameters that training changes, with the blocks of HF tensors that each holds."""
    rotaries: tuple[Rotary, ...]
    kernels: LayerKernels
    """What computes the layers, on which the names of the parameters depend."""

    @property
    def head(self) -> str:
        """`lm`, `value` or `score`."""
        return self.shape.head

    @property
    def vocab_start(self) -> int:
        """First token of this rank's part of the vocabulary."""
        return self.parallel.t * self.vocab_rows

    @property
    def vocab_rows(self) -> int:
        """Size of this rank's part of the vocabulary, padding included: `V' / T`."""
        return padded_vocab_size(self.shape.vocab, self.parallel.tensor) // self.parallel.tensor

    @property
    def token_share(self) -> int:
        """Number of tensor ranks that divide the rows between the matrices (sequence parallelism)."""
        return self.parallel.tensor if self.config.sequence_parallel else 1

    @property
    def row_multiple(self) -> int:
        """The number of rows is a multiple of it: tensor ranks divide them, and products in FP8 need it."""
        rows = FP8_NEEDS[Fp8Recipe(self.config.fp8_recipe)].row_multiple if self.config.fp8 else 1
        return self.token_share * rows

    def parameters_at(self, position: ShardPosition) -> tuple[MappedParameter, ...]:
        """Return the parameters of a rank that training changes."""
        return rank_parameters(self.trained_shape, position, self.kernels)

    @property
    def optimized_shapes(self) -> dict[str, tuple[int, ...]]:
        """HF name -> shape of each tensor of the whole model that has a gradient in training."""
        rows = (row for row in self.parameters_at(ShardPosition()) if not row.is_score_bias)
        return {part.tensor: part.shape for row in rows for part in row.parts}

    @property
    def whole(self) -> Stage:
        """The stage as if all of its weights but adapters were trained, by which they are read and saved."""
        parameters = rank_parameters(self.shape, self.parallel.shard_position, self.kernels)
        return replace(self, trained_shape=self.shape, parameters=parameters)

    def inputs(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: PackedLayout,
        division: RowDivision | None = None,
        replayed: ReplayedExperts | None = None,
        balanced: BalancedTokens | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of `module`, on every stage.

        `input_ids` and `position_ids`, int64 `[U]`, are of the tokens that are computed; positions begin at 0
        in each sequence. `layout` is for this stage's dtype, `replayed` what `replayed_here` returned (None:
        routers choose experts themselves), and `balanced` what routers count and balance of this rank's rows.
        """
        if division is not None:
            input_ids, position_ids = input_ids[division.rows], position_ids[division.rows]
        packed = PackedInputs.of(
            layout, position_ids, self.rotaries, self.dtype, division, replayed, balanced
        )
        num_padding = -len(input_ids) % self.row_multiple
        return {
            "input_ids": pad(input_ids, (0, num_padding))[None],
            "position_ids": None,
            "attention_mask": None,
            "packed_seq_params": packed,
        }

    def replayed_here(self, whole: ReplayedExperts, division: RowDivision | None) -> ReplayedExperts:
        """Return the experts that this rank's routers must choose for its part, of those for all U tokens."""
        index, num_tokens = whole.index, whole.num_tokens
        if division is not None:
            index, num_tokens = index[division.rows], num_tokens[division.rows]
            num_tokens[division.num_queries :] = 0
        return ReplayedExperts(self._on_tensor_rank(index), self._on_tensor_rank(num_tokens))

    def rows_here(self, num_tokens: int, division: RowDivision | None) -> Tensor:
        """Return the tokens, of U, that this rank's routers get, -1 for padding: int64 `[U' / T]`."""
        rows = torch.arange(1, num_tokens + 1, device=self.device)
        if division is not None:
            rows = rows[division.rows]
            rows[division.num_queries :] = 0
        return self._on_tensor_rank(rows) - 1

    def _on_tensor_rank(self, rows: Tensor) -> Tensor:
        """Return the part of U rows that is this tensor rank's between the matrices, padded with zeros."""
        num_padding = -len(rows) % self.row_multiple
        padded = pad(rows, (*(0, 0) * (rows.dim() - 1), 0, num_padding))
        num_rows = len(padded) // self.token_share
        first = self.parallel.t * num_rows if self.token_share > 1 else 0
        return padded[first : first + num_rows]

    def logits(self, hidden: Tensor, temperature: float = 1.0, kept: KeptSets | None = None) -> MatrixLogits:
        """Return the logits of hidden states `[N, D]`, on the last stage.

        Gradients of the hidden states are summed over the tensor ranks in the model's own backward pass.
        `kept` are the tokens that each row's distribution is over; None: all.
        """
        if self.shape.is_tied:
            weight = self.module.shared_embedding_or_output_weight()
        else:
            weight = self.module.output_layer.weight
        num_valid = min(max(self.shape.vocab - self.vocab_start, 0), self.vocab_rows)
        adapter = self.module.output_layer._modules.get("adapters")
        low = b = None
        if isinstance(adapter, OutputMatrixAdapter):
            low, b = adapter.factors(hidden)
        matrix = OutputMatrix(weight, None, self.vocab_start, num_valid, self.parallel.groups.tp, b)
        return MatrixLogits(hidden, matrix, temperature, kept, low)

    def zero_loss(self, hidden: Tensor) -> Tensor:
        """Return a loss of 0 whose backward pass gives all weights gradients, of 0, on the last stage.

        Gradients of a bucket are summed over data ranks once all of its weights have theirs.
        """
        if self.head == "lm":
            return self.logits(hidden[:0]).whole().sum()
        zero: Tensor = self.module.output_layer(hidden[:0]).sum()
        return zero


def build_stage(settings: ModelSettings, parallel: ParallelState, owner: Stage | None = None) -> Stage:
    """Build this rank's stage and load its weights, reading only its part of a checkpoint.

    A collective over the replica. The model is in training mode.

    Args:
        owner: a stage with adapters in the same layout, whose frozen weights this one uses.

    Raises:
        BackendError: if the settings, the architecture, the layout or the checkpoint are unusable.
    """
    check_choice("head", settings.head, HEADS)
    hf_config = read_config(settings)
    with translate_errors(settings.name):
        shape = supported_shape(hf_config, settings.head)
        stage = _uninitialized_stage(settings, hf_config, shape, parallel, has_base=owner is not None)
        if owner is not None:
            share_parameters(stage.module, owner.module)
        base = stage.whole.parameters if owner is None else ()
        parameters = {row.name: row for row in (*base, *stage.parameters)}.values()
        tensors = dict(stage.module.named_parameters())
        with open_weights(settings, shape, parameters) as read:
            load_parameters(parameters, tensors, read)
    set_magnitudes(stage.module)
    stage.module.requires_grad_(False)
    for row in stage.parameters:
        tensors[row.name].requires_grad_(settings.trainable and not row.is_score_bias)
    return stage


def _uninitialized_stage(
    settings: ModelSettings,
    hf_config: PreTrainedConfig,
    shape: ModelShape,
    parallel: ParallelState,
    *,
    has_base: bool,
) -> Stage:
    """Return a stage whose weights have no values yet, and with `has_base` no memory but what is trained."""
    kernels = LayerKernels(settings.kernels)
    if settings.fp8 is not None:
        _check_recipe(settings.name, Fp8Recipe(settings.fp8))
    _init_megatron_state(kernels)
    device, dtype = local_device(settings.device), DTYPES[settings.dtype]
    math = LayerMath.of(hf_config)
    config = transformer_config(shape, math, settings, dtype, parallel)
    with torch.device(device), parameters_on_meta() if has_base else nullcontext():
        module = _PackedModel(
            config,
            block_spec(config, shape, math, parallel, kernels),
            vocab_size=padded_vocab_size(shape.vocab, parallel.tensor),
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=parallel.is_first_stage,
            post_process=parallel.is_last_stage,
            share_embeddings_and_output_weights=shape.is_tied,
            position_embedding_type="none",
            pg_collection=parallel.groups,
        )
    inform_routers(module)
    if shape.head != "lm" and parallel.is_last_stage:
        module.output_layer = ScalarHead(shape.hidden, settings.seed, shape.head).to(device)
    position = parallel.shard_position
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    assert shapes == {row.name: row.module_shape for row in rank_parameters(shape, position, kernels)}, (
        "megatron has other parameters than the mapping"
    )
    trained, lora = shape, settings.lora
    if lora is not None:
        targets = lora.chosen(adapter_targets(shape))
        trained = adapted_shape(shape, lora.r, targets, has_magnitudes=lora.dora)
        with torch.device(device):
            add_adapters(module, trained, position, kernels, lora.scale)
    if parallel.is_first_stage:
        module.embedding.register_forward_hook(
            partial(_prepare_embedded, scale=math.embedding_scale, needs_gradient=lora is not None)
        )
    parameters = rank_parameters(trained, position, kernels)
    rotaries = tuple(
        rotary._replace(frequencies=rotary.frequencies.to(device))
        for rotary in rotaries_of(hf_config, shape.latent.rope if shape.latent else shape.head_dim)
    )
    return Stage(
        module, config, hf_config, shape, trained, parallel, dtype, device, parameters, rotaries, kernels
    )


def _prepare_embedded(
    embedding: nn.Module, args: object, output: Tensor, *, scale: float, needs_gradient: bool
) -> Tensor:
    """Return embedded tokens `[U', 1, D]` with the strides of a new tensor, multiplied by a factor.

    Megatron has transposed them, and torch would multiply rows with such strides by a frozen matrix one at a
    time, each with a copy of it. A frozen embedding's output gets a gradient, as without one a recomputed
    layer would have none for its adapters.
    """
    embedded = output.flatten(0, 1).unsqueeze(1)
    if scale != 1.0:
        embedded = embedded * torch.tensor(scale, dtype=embedded.dtype)  # rounded, as in transformers
    return embedded.requires_grad_() if needs_gradient and torch.is_grad_enabled() else embedded


def _check_recipe(model: str, recipe: Fp8Recipe) -> None:
    """Raise if this device, its CUDA or its libraries do not multiply in FP8."""
    from hflow.training.megatron.te_layers import recipe_problem

    if problem := recipe_problem(recipe):
        raise BackendError(
            f"fp8 is {recipe}, which Transformer Engine does not compute here: {problem}. Set "
            f"another recipe, or models.{model}.fp8=null"
        )


class _PackedModel(GPTModel):  # type: ignore[misc]  # megatron has no types
    """A GPT model that returns hidden states. Its head runs only on the rows that a node needs."""

    def _is_in_embd_group(self) -> bool:
        """Return False: both copies of a tied matrix are loaded, so none is sent to the other stage."""
        return False

    def _preprocess(self, *, packed_seq_params: PackedInputs, **others: Any) -> tuple[Tensor | None, ...]:
        """Return the embedding of this rank's rows, and what the layers need besides.

        In FP8, rows of padding are zeros, which change no scale.
        """
        hidden, *rest = super()._preprocess(packed_seq_params=packed_seq_params, **others)
        if hidden is not None and self.config.fp8:
            num_rows = len(hidden)
            first = self.tp_group.rank() * num_rows if self.config.sequence_parallel else 0
            num_real = min(max(packed_seq_params.num_real - first, 0), num_rows)
            hidden = pad(hidden[:num_real], (0, 0, 0, 0, 0, num_rows - num_real))
        return hidden, *rest

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: PackedInputs, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        prepare = _for_scalar_head if isinstance(self.output_layer, ScalarHead) else _for_logits
        hidden = prepare(hidden_states, self.tp_group, self.config.sequence_parallel)
        return hidden[: packed_seq_params.num_tokens, 0]


def _init_megatron_state(kernels: LayerKernels) -> None:
    """Set the values that megatron, and the layers of Transformer Engine, read from process-wide state."""
    if megatron_state._GLOBAL_MEMORY_BUFFER is None:
        megatron_state._set_global_memory_buffer()
    tracker = get_cuda_rng_tracker()
    of_te = kernels is LayerKernels.TRANSFORMER_ENGINE
    names = (_RNG, get_expert_parallel_rng_tracker_name()) if of_te else (_RNG,)
    for seed, name in enumerate(names):
        if name not in tracker.get_states():
            tracker.add(name, seed)


def _for_logits(hidden: Tensor, tp_group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Return hidden states `[U', 1, D]` of all tokens on all tensor ranks.

    Each rank's gradient covers its part of the vocabulary only, so the backward pass sums over ranks.
    """
    if sequence_parallel:
        gathered: Tensor = gather_from_sequence_parallel_region(hidden, group=tp_group)
        return gathered
    copied: Tensor = copy_to_tensor_model_parallel_region(hidden, group=tp_group)
    return copied


def _for_scalar_head(hidden: Tensor, tp_group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Return hidden states `[U', 1, D]` of all tokens on all tensor ranks, which all compute the whole head.

    Each rank's gradient is complete, so the backward pass does not sum.
    """
    if not sequence_parallel:
        return hidden
    gathered: Tensor = gather_from_sequence_parallel_region(
        hidden, tensor_parallel_output_grad=False, group=tp_group
    )
    return gathered
