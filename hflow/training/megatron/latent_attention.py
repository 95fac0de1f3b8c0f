"""Latent attention in megatron's layers: keys and values are projected from one small vector per token.

Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1. Megatron's own module needs Transformer Engine for
packed sequences.

Tensor ranks divide the matrices that have heads, and have the others whole. With sequence parallelism a rank
computes the small vectors of its part of the tokens, and ranks exchange these in place of hidden states;
gradients of what they have whole are summed with those of norms.

Axes: U computed tokens, U' the same padded, D hidden, H heads of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from hflow.shapes.model_shape import ModelShape
from hflow.training.megatron.attention import PackedInputs, attend_rows, rotate
from hflow.training.megatron.layers import RMSNorm
from hflow.training.megatron.supported_models import LayerMath

_EPSILON = 1e-6
"""The epsilon of norms of small vectors, which transformers does not read from configs."""


class WholeLinear(nn.Module):
    """A linear layer `[..., I]` -> `[..., O]` that all tensor ranks have whole, with megatron's interface."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, config: Any, tp_group: ProcessGroup) -> None:
        """Allocate weights without initialising them; `config` is megatron's `TransformerConfig`."""
        super().__init__()
        self.tp_group = tp_group
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=config.params_dtype)) if bias else None
        for weight in self.parameters():
            weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Multiply; the second result, a bias still to add, is None."""
        return linear(x, self.weight, self.bias), None


class PackedLatentAttention(nn.Module):
    """Attention with the interface of megatron's `SelfAttention`."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        *,
        model: ModelShape,
        math: LayerMath,
    ) -> None:
        """Allocate weights without initialising them. Megatron passes `layer_number`, which is not used."""
        super().__init__()
        assert model.latent is not None
        self.sizes = sizes = model.latent
        self.math, self.tp_group, self.sequence_parallel = math, pg_collection.tp, config.sequence_parallel
        self.num_heads = model.num_heads // self.tp_group.size()
        options = {"config": config, "init_method": config.init_method, "tp_group": self.tp_group}

        def to_heads(inputs: int, size: int) -> Any:
            outputs = model.num_heads * size
            return ColumnParallelLinear(inputs, outputs, gather_output=False, bias=False, **options)

        def to_small(outputs: int) -> WholeLinear:
            bias = model.has_qkv_bias
            return WholeLinear(model.hidden, outputs, bias=bias, config=config, tp_group=self.tp_group)

        inputs = model.hidden
        if sizes.q_rank is not None:
            inputs = sizes.q_rank
            self.linear_q_down, self.q_norm = to_small(inputs), RMSNorm(config, inputs, _EPSILON)
        self.linear_q = to_heads(inputs, sizes.nope + sizes.rope)
        self.linear_kv_down, self.kv_norm = to_small(sizes.cached), RMSNorm(config, sizes.kv_rank, _EPSILON)
        self.linear_kv = to_heads(sizes.kv_rank, sizes.nope + sizes.value)
        self.linear_proj = RowParallelLinear(
            model.num_heads * sizes.value,
            model.hidden,
            bias=model.has_out_bias,
            input_is_parallel=True,
            skip_bias_add=True,
            **options,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: None, *, packed_seq_params: PackedInputs, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: `[U', 1, D]` -> `[U', 1, D]`, with a bias `[D]` still to add, if there is one."""
        inputs, sizes = packed_seq_params, self.sizes
        small = hidden_states if sizes.q_rank is None else self.q_norm(self.linear_q_down(hidden_states)[0])
        q = self._heads(self.linear_q(small)[0])
        small, rope = self.linear_kv_down(hidden_states)[0].split((sizes.kv_rank, sizes.rope), dim=-1)
        keys, v = self._heads(self.linear_kv(self.kv_norm(small))[0]).split((sizes.nope, sizes.value), dim=-1)
        exchange = (
            gather_from_sequence_parallel_region
            if self.sequence_parallel
            else copy_to_tensor_model_parallel_region
        )
        q = torch.cat((q[..., : sizes.nope], self._rotated(q[..., sizes.nope :], inputs)), dim=-1)
        rotated = self._rotated(exchange(rope, group=self.tp_group), inputs)
        k = torch.cat((keys, rotated.expand(-1, self.num_heads, -1)), dim=-1)
        out = attend_rows(q, k, v, inputs, self.math.score_scale)
        projected: tuple[Tensor, Tensor | None] = self.linear_proj(out.flatten(1).unsqueeze(1))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        """Return `[U', 1, H * size]` as `[U', H, size]`."""
        heads: Tensor = x.squeeze(1).unflatten(-1, (self.num_heads, -1))
        return heads

    def _rotated(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """Rotate the first U rows of `[U', heads, size]`, and leave padding as it is."""
        rotated = rotate(x[: inputs.num_tokens], inputs.rotation(None), self.math.is_interleaved)
        return torch.cat((rotated, x[inputs.num_tokens :])) if len(x) > len(rotated) else rotated
