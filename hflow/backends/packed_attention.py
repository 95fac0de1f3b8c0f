"""Attention over packed sequences, for any HF decoder that dispatches its attention.

Q, K and V arrive as one row of T tokens that holds S sequences; no token attends beyond its own.
A model built with `attn_implementation=PACKED` and called with `packed_layout=PackedLayout.of(...)`
computes exactly what it would compute on each sequence alone. On CUDA in half precision that is
one variable-length flash kernel; elsewhere sequences are padded on the right, in buckets of
similar length, for causal SDPA, where padding changes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from hflow.errors import BackendError

PACKED = "hflow_packed"
"""Name under which HF models find this attention."""

_SHORTEST_IN_BUCKET = 0.75
"""Least length in a bucket, over its greatest: bounds what is spent on padding."""

_HAS_GROUPED_VARLEN = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether this torch's variable-length kernel knows grouped queries; early ones do not."""

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "chunk_size")
"""Keyword arguments by which HF models ask for another attention than the plain causal one."""


@dataclass(frozen=True)
class PaddedLayout:
    """How T packed tokens lie in N padded slots, bucket after bucket, row after row."""

    shapes: tuple[tuple[int, int], ...]
    """(sequences, slots a sequence) of each bucket."""
    token_of_slot: Tensor
    """int64 `[N]`; padding slots repeat token 0."""
    slot_of_token: Tensor
    """int64 `[T]`."""
    filled: Tensor
    """bool `[N]`, false for padding."""


@dataclass(frozen=True)
class SharedRows:
    """`data.prefixes.Sharing` on the device: U computed rows stand for T tokens."""

    token_of_row: Tensor
    """int64 `[U]`."""
    row_of_token: Tensor
    """int64 `[T]`."""


@dataclass(frozen=True)
class PackedLayout:
    """Where the sequences of one forward lie; made once for all layers."""

    num_sequences: int
    max_length: int
    cumulative: Tensor
    """int32 `[S + 1]`."""
    padding: PaddedLayout | None
    """None where all sequences are of one length, or the kernel needs no padding."""
    shared: SharedRows | None = None
    """Where q, k and v arrive as `[U]` rows, several tokens of one prefix sharing a row."""

    @classmethod
    def of(
        cls,
        lengths: npt.NDArray[np.int64],
        device: torch.device | str,
        dtype: torch.dtype,
        shared: SharedRows | None = None,
    ) -> PackedLayout:
        """Lay out sequences of these lengths (on the host; each at least 1) for q, k, v of `dtype`."""
        uniform = bool((lengths == lengths[0]).all())
        needs_padding = not uniform and not _has_varlen_kernel(torch.device(device), dtype)
        cumulative = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return cls(
            num_sequences=len(lengths),
            max_length=int(lengths.max()),
            cumulative=torch.from_numpy(cumulative).to(device),
            padding=_padding(lengths, device) if needs_padding else None,
            shared=shared,
        )


def check_supported(model: PreTrainedModel) -> None:
    """Refuse a model whose attention is not the plain causal one.

    Raises:
        BackendError: naming the architecture and what it asks for.
    """
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise BackendError(f"{name} does not dispatch its attention, which packed sequences need")
    windows = [w for module in model.modules() if (w := getattr(module, "sliding_window", None)) is not None]
    layers = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention"}
    if windows or layers:
        what = ", ".join(sorted(layers)) or f"a sliding window of {max(windows)}"
        raise BackendError(f"{name} uses {what}; only full causal attention is supported on packed sequences")


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
    """HF's attention interface: `[1, H, T, d]` in, `[1, T, H, d]` out; dropout is never applied.

    With shared rows it is U instead of T on both sides: what is saved are all other layers' rows.

    Raises:
        BackendError: when the model asks for a variant that is not plain causal attention.
    """
    wanted = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if wanted:
        raise BackendError(f"{type(module).__name__} asks for {wanted[0]}, which packed attention has not")
    if packed_layout is None:
        raise BackendError(f"{type(module).__name__} is not told where the packed sequences lie")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, packed_layout, scaling)[None], None


def attend(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scaling: float | None) -> Tensor:
    """Causal attention within each sequence: `[T, H, d]`, k and v with as many heads or a divisor of them.

    With shared rows it is U instead of T on both sides.
    """
    shared = layout.shared
    if shared is not None:
        q, k, v = (x.index_select(0, shared.row_of_token) for x in (q, k, v))
    kernel = _flash if _has_varlen_kernel(q.device, q.dtype) else _padded
    out = kernel(q, k, v, layout, scaling)
    return out if shared is None else out.index_select(0, shared.token_of_row)


AttentionInterface.register(PACKED, packed_attention)


def _has_varlen_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return _HAS_GROUPED_VARLEN and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def _flash(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scaling: float | None) -> Tensor:
    """`[T, H, d]` by the variable-length kernel; a window of (-1, 0) is causal attention."""
    cumulative, longest = layout.cumulative, layout.max_length
    out = varlen_attn(
        q, k, v, cumulative, cumulative, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=True
    )
    assert isinstance(out, Tensor)
    return out


def _padded(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scaling: float | None) -> Tensor:
    """`[T, H, d]` by causal SDPA over right-padded buckets."""
    padding = layout.padding
    if padding is None:
        shape = (layout.num_sequences, layout.max_length)
        assert shape[0] * shape[1] == len(q), f"a layout for another dtype than {q.dtype}"
        return _causal(q, k, v, shape, scaling)
    sizes = [rows * width for rows, width in padding.shapes]
    queries, keys, values = (torch.split(_spread(x, padding), sizes) for x in (q, k, v))
    buckets = [
        _causal(*bucket, scaling) for bucket in zip(queries, keys, values, padding.shapes, strict=True)
    ]
    return _collect(torch.cat(buckets), padding)


def _causal(q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, int], scaling: float | None) -> Tensor:
    """Causal attention of `[S * L, H, d]` in S rows of L tokens."""
    query, key, value = (x.reshape(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])


class _Spread(torch.autograd.Function):
    """Packed tokens `[T, ...]` to padded slots `[N, ...]`.

    Its backward is a gather, not a scatter: padding slots get no gradient from causal attention.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: PaddedLayout) -> Tensor:
        ctx.padding = padding
        return x.index_select(0, padding.token_of_slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.padding.slot_of_token), None


class _Collect(torch.autograd.Function):
    """Padded slots `[N, ...]` back to packed tokens `[T, ...]`; padding gets gradient 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: PaddedLayout) -> Tensor:
        ctx.padding = padding
        return x.index_select(0, padding.slot_of_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        spread = grad.index_select(0, ctx.padding.token_of_slot)
        return spread.masked_fill_(~ctx.padding.filled[:, None, None], 0), None


_spread: Callable[[Tensor, PaddedLayout], Tensor] = _Spread.apply
_collect: Callable[[Tensor, PaddedLayout], Tensor] = _Collect.apply


def _padding(lengths: npt.NDArray[np.int64], device: torch.device | str) -> PaddedLayout:
    """Sequences by decreasing length, cut into buckets; all index tables on the host first."""
    order = np.argsort(-lengths, kind="stable")
    starts = np.cumsum(lengths) - lengths
    shapes, tokens, filled = [], [], []
    while len(order):
        width = int(lengths[order[0]])
        size = int(np.searchsorted(-lengths[order], -_SHORTEST_IN_BUCKET * width, side="right"))
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
        torch.from_numpy(token_of_slot).to(device),
        torch.from_numpy(slot_of_token).to(device),
        torch.from_numpy(mask).to(device),
    )
