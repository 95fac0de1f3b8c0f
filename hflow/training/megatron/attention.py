"""Megatron's core attention for packed sequences: rotates q and k, then attends within each sequence.

Megatron's own attention needs Transformer Engine for packed sequences, and its rotary embedding computes
sines in every layer, sequence by sequence. Here they are computed once per forward pass.

Axes: U computed tokens, U' the same padded for sequence parallelism and FP8, H heads, E head size, R entries
of a head that are rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hflow.models.attention_kernels import CAUSAL, Reach
from hflow.models.expert_balance import BalancedTokens
from hflow.models.expert_replay import ReplayedExperts
from hflow.models.packed_attention import PackedLayout, attend
from hflow.training.megatron.context_parallel import RowDivision, attend_to_all
from hflow.training.megatron.supported_models import LayerMath, ropes_of


class Rotation(NamedTuple):
    """A rotary embedding at the positions of tokens."""

    cos: Tensor
    """`[U, 1, R]`, in the dtype of the forward pass. R entries of each head are rotated."""
    sin: Tensor


@dataclass(frozen=True)
class PackedInputs:
    """Inputs that all layers of a forward pass need; megatron passes them as `packed_seq_params`."""

    layout: PackedLayout
    rotations: tuple[Rotation, ...]
    """One for all layers, or that of layers without windows and that of layers with."""
    division: RowDivision | None
    """With context parallelism, U is the number of this rank's rows."""
    replayed: ReplayedExperts | None = None
    """The experts that this rank's routers are to choose; None: they choose themselves."""
    balanced: BalancedTokens | None = None
    """What this rank's routers count and balance; None: nothing."""
    qkv_format: str = "thd"
    """Tells megatron that there is no batch axis."""

    @classmethod
    def of(
        cls,
        layout: PackedLayout,
        position_ids: Tensor,
        rotaries: Sequence[Rotary],
        dtype: torch.dtype,
        division: RowDivision | None = None,
        replayed: ReplayedExperts | None = None,
        balanced: BalancedTokens | None = None,
    ) -> PackedInputs:
        """Compute the rotations of positions, int64 `[U]`, with embeddings on the same device.

        Args:
            division: the division of the rows over context ranks; None without context parallelism.
            replayed: the experts that routers are to choose; None: they choose themselves.
            balanced: what routers count and balance; None: nothing.
        """
        rotations = []
        for rotary in rotaries:
            angles = position_ids[:, None].float() * rotary.frequencies
            angles = torch.cat((angles, angles), dim=-1)[:, None]
            rotations.append(Rotation(*((x * rotary.factor).to(dtype) for x in (angles.cos(), angles.sin()))))
        return cls(layout, tuple(rotations), division, replayed, balanced)

    def rotation(self, window: int | None) -> Rotation:
        """Return the rotation of a layer with a window, or without."""
        return self.rotations[0 if window is None else -1]

    @property
    def num_tokens(self) -> int:
        """U, without the padding for sequence parallelism and FP8."""
        return len(self.rotations[0].cos)

    @property
    def num_real(self) -> int:
        """U without the padding of context ranks, which is at its end."""
        return self.num_tokens if self.division is None else self.division.num_queries


class PackedAttention(nn.Module):
    """Core attention with the interface of megatron's. It has no weights but sinks."""

    def __init__(
        self, config: Any, layer_number: int, *, math: LayerMath, has_sinks: bool = False, **_: Any
    ) -> None:
        """Take the arguments of megatron's layer specs, of which others are ignored, and what is computed."""
        super().__init__()
        self.math, self.window = math, math.windows[layer_number - 1]
        self.sinks: nn.Parameter | None = None
        """See `Reach`, of this rank's heads."""
        if has_sinks:
            num_heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: PackedInputs,
        **_: Any,
    ) -> Tensor:
        """Attend: `[U', H, E]` -> `[U', H, E]`. Tokens after the first U are padding and get zeros."""
        inputs = packed_seq_params
        rotation = inputs.rotation(self.window)
        is_interleaved = self.math.is_interleaved
        q, k = (rotate(x[: inputs.num_tokens], rotation, is_interleaved) for x in (query, key))
        return attend_rows(q, k, value, inputs, self.math.score_scale, Reach(self.window, self.sinks))


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, inputs: PackedInputs, scale: float | None, reach: Reach = CAUSAL
) -> Tensor:
    """Attend to rotated keys: `[U', H, E]` -> `[U', H, E]`; v has U' rows, q and k that many or U.

    Tokens after the first U are padding and get zeros. Values may have another size, which results have.
    """
    num_tokens, num_padding = inputs.num_tokens, len(v) - inputs.num_tokens
    q, k, v = (x[:num_tokens] for x in (q, k, v))
    if inputs.division is None:
        # A view would keep the whole projection to q, k and v until the backward pass.
        out = attend(q, k, v.contiguous(), inputs.layout, scale, reach)
    else:
        out = attend_to_all(q, k, v, inputs.division, inputs.layout.kernel, scale, reach)
    if not num_padding:
        return out  # `pad` would copy it
    padded: Tensor = pad(out, (0, 0, 0, 0, 0, num_padding))
    return padded


def rotate(x: Tensor, rotation: Rotation, is_interleaved: bool) -> Tensor:
    """Apply the rotary embedding to the first R of `[U, H, E]`.

    Their halves are coordinates of planes, or neighbours are, which are moved to halves.
    """
    cos, sin = rotation
    rotated, others = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if is_interleaved:
        rotated = torch.cat((rotated[..., 0::2], rotated[..., 1::2]), dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, others), dim=-1) if others.shape[-1] else turned


class Rotary(NamedTuple):
    """A rotary embedding."""

    frequencies: Tensor
    """fp32 `[R / 2]`: the angle per position by which each plane turns."""
    factor: float = 1.0
    """Factor of rotated entries."""


def rotaries_of(config: PreTrainedConfig, head_dim: int) -> tuple[Rotary, ...]:
    """Return the rotary embeddings of heads, or of the rotated part of heads, of size `head_dim`."""
    return tuple(_rotary(config, kind, rope, head_dim) for kind, rope in ropes_of(config).items())


def _rotary(config: PreTrainedConfig, kind: str | None, rope: dict[str, Any], head_dim: int) -> Rotary:
    if rope["rope_type"] != "default":
        return Rotary(*ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, layer_type=kind))
    size = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    inverse: Tensor = rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return Rotary(1.0 / inverse)
