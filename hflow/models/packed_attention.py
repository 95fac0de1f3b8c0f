"""Attention over packed sequences, for any HF decoder with pluggable attention.

Q, K and V arrive as one row of T tokens that holds S sequences; each token attends within its own sequence.
A model built with `attn_implementation=PACKED` and called with `packed_layout=PackedLayout.of(...)` computes
what it would compute on each sequence alone. Variable-length kernels take the sequences as they are. For
others they are padded on the right, in buckets of similar length; causal attention does not see the padding.

Axes: S sequences, T packed tokens, U computed tokens (T without repeated prompt prefixes), N padded slots,
H heads, L length of a bucket, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from hflow.base.errors import BackendError
from hflow.data.batches.device_copy import to_device
from hflow.models.attention_kernels import CAUSAL, Reach, kernel_of, reaching_attention, varlen_attention
from hflow.types.kernels import AttentionKernel

PACKED = "hflow_packed"
"""Name of this attention for `attn_implementation`."""

_MIN_LENGTH_RATIO = 0.75
"""Minimum ratio of the shortest to the longest sequence in a bucket, which bounds the padding."""

_UNSUPPORTED = ("softcap", "position_bias", "chunk_size")
"""Keyword arguments with which HF models ask for more than causal attention with windows and sinks."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class PaddedLayout:
    """Positions of T packed tokens in N padded slots, ordered by bucket, then by row."""

    shapes: tuple[tuple[int, int], ...]
    """(sequences, slots per sequence) of each bucket."""
    token_of_slot: Tensor
    """int64 `[N]`; padding slots repeat token 0."""
    slot_of_token: Tensor
    """int64 `[T]`."""
    filled: Tensor
    """bool `[N]`, false for padding slots."""


@dataclass(frozen=True)
class SharedRows:
    """`data.batches.shared_prefix.PrefixSharing` on the device: U computed rows represent T tokens."""

    token_of_row: Tensor
    """int64 `[U]`."""
    row_of_token: Tensor
    """int64 `[T]`."""


@dataclass(frozen=True)
class PackedLayout:
    """Positions of the sequences of one forward pass; made once for all layers."""

    kernel: AttentionKernel
    num_sequences: int
    max_length: int
    cumulative: Tensor
    """int32 `[S + 1]`: sequence s is tokens `cumulative[s]:cumulative[s + 1]`."""
    padding: PaddedLayout | None
    """None if all sequences have one length, or the kernel needs no padding."""
    shared: SharedRows | None = None
    """Set if q, k and v arrive as U rows, where sequences of one group share the rows of their prefix."""

    @classmethod
    def of(
        cls,
        lengths: npt.NDArray[np.int64],
        device: torch.device | str,
        dtype: torch.dtype,
        shared: SharedRows | None = None,
    ) -> PackedLayout:
        """Lay out sequences.

        Args:
            lengths: int64 `[S]` on the host, each at least 1.
            device: the model's device.
            dtype: the dtype of q, k and v, on which the kernel depends.
            shared: rows of shared prefixes; None if there are none.
        """
        uniform = bool((lengths == lengths[0]).all())
        kernel = kernel_of(torch.device(device), dtype)
        needs_padding = not uniform and kernel is AttentionKernel.SDPA
        cumulative = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return cls(
            kernel=kernel,
            num_sequences=len(lengths),
            max_length=int(lengths.max()),
            cumulative=to_device(torch.from_numpy(cumulative), device),
            padding=_padded_layout(lengths, device) if needs_padding else None,
            shared=shared,
        )


def check_supported(model: PreTrainedModel) -> None:
    """Check that a model's attention is pluggable, and causal in each layer, if in a sliding window.

    Raises:
        BackendError: if it is not; names the architecture and what it uses.
    """
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise BackendError(
            f"{name} has no pluggable attention, which packed sequences need; choose another architecture"
        )
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or ()
    others = set(layers) - set(_LAYER_TYPES)
    of_layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    sized = {x.layer_idx for x in of_layers if getattr(x, "sliding_window", None) is not None}
    if not others and {i for i, kind in enumerate(layers) if kind == "sliding_attention"} - sized:
        others = {"sliding_attention of an unknown size"}
    if not all(getattr(module, "is_causal", True) for module in of_layers):
        others |= {"attention to later tokens"}
    if getattr(config, "attn_logit_softcapping", None) is not None:
        others |= {"soft caps of scores"}
    if others:
        raise BackendError(
            f"{name} uses {', '.join(sorted(others))}, but packed sequences support causal attention and "
            "sliding windows only; choose another architecture"
        )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence; HF's attention interface: `[1, H, T, d]` in, `[1, T, H, d]` out.

    Dropout is never applied. With shared prefixes, T is U on both sides: attention itself computes all T
    tokens, and the model's other layers only U.

    Raises:
        BackendError: if the model asks for more than causal attention with windows and sinks.
    """
    reach = reach_of(module, kwargs)
    if packed_layout is None:
        raise BackendError(f"{type(module).__name__} was called without packed_layout")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, packed_layout, scaling, reach)[None], None


def reach_of(module: nn.Module, arguments: Mapping[str, Any]) -> Reach:
    """Return the keys that a layer attends to, by the further arguments of HF's attention interface.

    Raises:
        BackendError: if the model asks for more than causal attention with windows and sinks.
    """
    unsupported = [name for name in _UNSUPPORTED if arguments.get(name) is not None]
    if unsupported:
        raise BackendError(
            f"{type(module).__name__} needs {unsupported[0]}, which packed attention does not support; "
            "choose another architecture"
        )
    return Reach(arguments.get("sliding_window"), arguments.get("s_aux"))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    scaling: float | None,
    reach: Reach = CAUSAL,
) -> Tensor:
    """Compute causal attention within each sequence: q `[T, H, d]` -> `[T, H, d]`.

    k and v have H heads or a divisor of H. With shared prefixes, T is U on both sides.

    Raises:
        BackendError: if heads have sinks, and the kernel takes sequences as they are.
    """
    shared = layout.shared
    if shared is not None:
        q, k, v = (x.index_select(0, shared.row_of_token) for x in (q, k, v))
    if layout.kernel is AttentionKernel.SDPA:
        out = _padded(q, k, v, layout, scaling, reach)
    else:
        if reach.sinks is not None:
            raise BackendError(f"{layout.kernel} does not compute attention with sinks; set dtype=fp32")
        cumulative, longest = (layout.cumulative,) * 2, (layout.max_length,) * 2
        out = varlen_attention(layout.kernel, q, k, v, cumulative, longest, scaling, reach.window)
    return out if shared is None else out.index_select(0, shared.token_of_row)


AttentionInterface.register(PACKED, packed_attention)


def _padded(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scaling: float | None, reach: Reach
) -> Tensor:
    """Compute `[T, H, d]` with causal SDPA over right-padded buckets."""
    padding = layout.padding
    if padding is None:
        shape = (layout.num_sequences, layout.max_length)
        assert shape[0] * shape[1] == len(q), f"a layout for another dtype than {q.dtype}"
        return _causal(q, k, v, shape, scaling, reach)
    sizes = [rows * width for rows, width in padding.shapes]
    queries, keys, values = (torch.split(_pad(x, padding), sizes) for x in (q, k, v))
    buckets = [
        _causal(*bucket, scaling, reach) for bucket in zip(queries, keys, values, padding.shapes, strict=True)
    ]
    return _unpad(torch.cat(buckets), padding)


def _causal(
    q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, int], scaling: float | None, reach: Reach
) -> Tensor:
    """Compute causal attention of `[S * L, H, d]` in S rows of L tokens."""
    query, key, value = (x.reshape(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = reaching_attention(query, key, value, scaling, reach)
    return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])


class _Pad(torch.autograd.Function):
    """Copy packed tokens to padded slots: `[T, ...]` -> `[N, ...]`.

    Padding slots get no gradient from causal attention, so the backward pass is a gather, not a scatter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: PaddedLayout) -> Tensor:
        ctx.padding = padding
        return x.index_select(0, padding.token_of_slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.padding.slot_of_token), None


class _Unpad(torch.autograd.Function):
    """Copy padded slots back to packed tokens: `[N, ...]` -> `[T, ...]`. Padding gets gradient 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: PaddedLayout) -> Tensor:
        ctx.padding = padding
        return x.index_select(0, padding.slot_of_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        padded = grad.index_select(0, ctx.padding.token_of_slot)
        return padded.masked_fill_(~ctx.padding.filled[:, None, None], 0), None


_pad: Callable[[Tensor, PaddedLayout], Tensor] = _Pad.apply
_unpad: Callable[[Tensor, PaddedLayout], Tensor] = _Unpad.apply


def _padded_layout(lengths: npt.NDArray[np.int64], device: torch.device | str) -> PaddedLayout:
    """Split sequences by decreasing length into buckets. Index tables are made on the host and then moved."""
    order = np.argsort(-lengths, kind="stable")
    starts = np.cumsum(lengths) - lengths
    shapes, tokens, filled = [], [], []
    while len(order):
        width = int(lengths[order[0]])
        size = int(np.searchsorted(-lengths[order], -_MIN_LENGTH_RATIO * width, side="right"))
        rows, order = order[:size], order[size:]
        steps = np.arange(width)
        within = steps < lengths[rows, None]
        tokens.append(np.where(within, starts[rows, None] + steps, 0).ravel())
        filled.append(within.ravel())
        shapes.append((size, width))
    token_of_slot, mask = np.concatenate(tokens), np.concatenate(filled)
    slot_of_token = np.empty(int(lengths.sum()), dtype=np.int64)
    slot_of_token[token_of_slot[mask]] = np.flatnonzero(mask)
    return PaddedLayout(
        tuple(shapes),
        to_device(torch.from_numpy(token_of_slot), device),
        to_device(torch.from_numpy(slot_of_token), device),
        to_device(torch.from_numpy(mask), device),
    )
