"""One rank's stage of a model: megatron's GPT model of its layers and tensor shard, with its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import linear, pad
from transformers import PreTrainedConfig

from hflow.backends.device import local_device
from hflow.backends.hf_config import read_config, refusals
from hflow.backends.interface import ModelSettings
from hflow.backends.megatron.attention import PackedInputs, rotary_frequencies
from hflow.backends.megatron.checkpoint_reader import fill, open_weights
from hflow.backends.megatron.config import block_spec, transformer_config
from hflow.backends.megatron.hf_mapping import MappedParameter, padded_vocabulary, parameters
from hflow.backends.megatron.model_dims import ModelDims, check_split, read_dims
from hflow.backends.megatron.parallel_state import ParallelState
from hflow.backends.packed_attention import PackedLayout
from hflow.backends.torch_model.build import DTYPES, HEADS, check_choice
from hflow.backends.torch_model.heads import ScalarHead

# -------------------- How the last stage's hidden states reach its head, and the head's part of the
# vocabulary.
# The head runs on the rows that a node asks for only, so the model returns hidden states and not logits.


PADDED = -1e30
"""Logit of a vocabulary entry that is padding: its probability is 0, and 0 times it is 0, not nan."""


def enter_vocabulary(hidden: Tensor, tp_group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Hidden states `[U', 1, D]` of all tokens on all tensor ranks.

    Each rank's gradient is of its part of the vocabulary only; the backward pass sums them.
    """
    if sequence_parallel:
        gathered: Tensor = gather_from_sequence_parallel_region(hidden, group=tp_group)
        return gathered
    copied: Tensor = copy_to_tensor_model_parallel_region(hidden, group=tp_group)
    return copied


def enter_scalar(hidden: Tensor, tp_group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Hidden states `[U', 1, D]` of all tokens on all tensor ranks, which all compute the whole head.

    Each rank's gradient is the whole one already.
    """
    if not sequence_parallel:
        return hidden
    gathered: Tensor = gather_from_sequence_parallel_region(
        hidden, tensor_parallel_output_grad=False, group=tp_group
    )
    return gathered


def part_of_logits(rows: Tensor, weight: Tensor, num_valid: int) -> Tensor:
    """Logits `[N, V' / T]` of hidden states `[N, D]` that have entered the vocabulary.

    Args:
        rows: hidden states.
        weight: this rank's rows of the output matrix, `[V' / T, D]`.
        num_valid: how many of them are no padding.
    """
    logits = linear(rows, weight)
    if num_valid < len(weight):
        logits[:, num_valid:] = PADDED
    return logits


_RNG = "model-parallel-rng"
"""Megatron's random state for dropout in sharded regions, which it asks for though there is none."""


@dataclass(frozen=True)
class Stage:
    """A rank's part of a model, and how it is called."""

    module: GPTModel
    """Called with `inputs(...)`. Returns what the next stage takes; the last one returns hidden states
    `[U, D]`, the same on all tensor ranks, which are ready for `logits` or the scalar `output_layer`."""
    config: TransformerConfig
    hf_config: PreTrainedConfig
    dims: ModelDims
    parallel: ParallelState
    dtype: torch.dtype
    """What the model computes in, and its weights are in; a scalar head is in fp32."""
    device: torch.device
    parameters: tuple[MappedParameter, ...]
    """Which blocks of the checkpoint each of the module's parameters holds."""
    frequencies: Tensor
    """Of the rotary embedding, `[E / 2]`."""

    @property
    def head(self) -> str:
        """`lm`, `value` or `score`."""
        return self.dims.head

    @property
    def vocab_start(self) -> int:
        """The first token of this rank's part of the vocabulary."""
        return self.parallel.t * self.vocab_rows

    @property
    def vocab_rows(self) -> int:
        """Size of this rank's part of the vocabulary, padding included: `V' / T`."""
        return padded_vocabulary(self.dims.vocab, self.parallel.tensor) // self.parallel.tensor

    def inputs(self, input_ids: Tensor, position_ids: Tensor, layout: PackedLayout) -> dict[str, Any]:
        """What `module` is called with, on every stage.

        Args:
            input_ids: int64 `[U]`, the tokens that are computed.
            position_ids: int64 `[U]`, from 0 in each sequence.
            layout: where the sequences lie, made for this stage's dtype.
        """
        packed = PackedInputs.of(layout, position_ids, self.frequencies, self.dtype)
        # Under sequence parallelism tensor ranks share tokens equally.
        surplus = -len(input_ids) % self.parallel.tensor if self.config.sequence_parallel else 0
        return {
            "input_ids": pad(input_ids, (0, surplus))[None],
            "position_ids": None,
            "attention_mask": None,
            "packed_seq_params": packed,
        }

    def logits(self, rows: Tensor) -> Tensor:
        """The logits `[N, V' / T]` of hidden states `[N, D]` that this rank of the last stage makes.

        The part of rank t begins at token `t * V' / T`; padding has logit `heads.PADDED`. Gradients of
        the hidden states are summed over the tensor ranks where they left the model.
        """
        if self.dims.is_tied:
            weight = self.module.shared_embedding_or_output_weight()
        else:
            weight = self.module.output_layer.weight
        num_valid = min(max(self.dims.vocab - self.vocab_start, 0), self.vocab_rows)
        return part_of_logits(rows, weight, num_valid)


def build(settings: ModelSettings, parallel: ParallelState) -> Stage:
    """Build this rank's stage and load its weights, reading no more of a checkpoint than them.

    Making the model is a collective over the parallel. It is in training mode.

    Raises:
        BackendError: when the settings, the architecture, the layout or the checkpoint do not fit.
    """
    check_choice("head", settings.head, HEADS)
    check_choice("dtype", settings.dtype, DTYPES)
    hf_config = read_config(settings)
    with refusals(settings.name):
        dims = read_dims(hf_config, settings.head)
        check_split(dims, parallel.tensor, parallel.pipe)
        stage = _empty(settings, hf_config, dims, parallel)
        with open_weights(settings, dims) as read:
            fill(stage.parameters, dict(stage.module.named_parameters()), read)
    stage.module.requires_grad_(settings.trainable)
    return stage


def _empty(
    settings: ModelSettings, hf_config: PreTrainedConfig, dims: ModelDims, parallel: ParallelState
) -> Stage:
    """A stage whose weights have no values yet."""
    _make_ready()
    device, dtype = local_device(settings.device), DTYPES[settings.dtype]
    config = transformer_config(dims, hf_config.rms_norm_eps, settings, dtype, parallel)
    with torch.device(device):
        module = _PackedModel(
            config,
            block_spec(dims, parallel),
            vocab_size=padded_vocabulary(dims.vocab, parallel.tensor),
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=parallel.is_first_stage,
            post_process=parallel.is_last_stage,
            share_embeddings_and_output_weights=dims.is_tied,
            position_embedding_type="none",
            pg_collection=parallel.groups,
        )
    if dims.head != "lm" and parallel.is_last_stage:
        module.output_layer = ScalarHead(dims.hidden, settings.seed).to(device)
    rows = parameters(dims, parallel.place)
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    assert shapes == {row.name: row.shape for row in rows}, "megatron's parameters are others than ours"
    frequencies = rotary_frequencies(hf_config, dims.head_dim).to(device)
    return Stage(module, config, hf_config, dims, parallel, dtype, device, rows, frequencies)


class _PackedModel(GPTModel):  # type: ignore[misc]  # megatron has no types
    """Ends with the hidden states that its head takes."""

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: PackedInputs, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        enter = enter_scalar if isinstance(self.output_layer, ScalarHead) else enter_vocabulary
        hidden = enter(hidden_states, self.tp_group, self.config.sequence_parallel)
        return hidden[: packed_seq_params.num_tokens, 0]


def _make_ready() -> None:
    """Give megatron the two things that it looks up in its process-wide state."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    tracker = get_cuda_rng_tracker()
    if _RNG not in tracker.get_states():
        tracker.add(_RNG, seed=0)
