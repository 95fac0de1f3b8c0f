"""Attention over packed sequences, for any HF decoder with pluggable attention.

Q, K and V arrive as one row of T tokens that holds S sequences; each token attends within its own sequence.
A model built with `attn_implementation=PACKED` and called with `packed_layout=PackedLayout.of(...)` computes
what it would compute on each sequence alone. Variable-length kernels take the sequences as they are. For
others they are padded on the right, in buckets of similar length; causal attention does not see the padding.

Where sequences of a group begin with the same tokens, each has the queries of its own tokens only, and the
keys of all. So a prompt attends to itself once.

Axes: S sequences, T packed tokens, U computed tokens (T without repeated prompt prefixes), N padded slots of
U, K keys (T, or padded slots of T), H heads, L queries and M keys of a sequence in a bucket, d head size.
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
from hflow.data.batches.shared_prefix import PrefixSharing
from hflow.models.attention_kernels import (
    CAUSAL,
    Reach,
    additive_mask,
    kernel_of,
    reaching_attention,
    varlen_attention,
)
from hflow.types.kernels import AttentionKernel

PACKED = "hflow_packed"
"""Name of this attention for `attn_implementation`."""

_MIN_LENGTH_RATIO = 0.75
"""Minimum ratio of the shortest to the longest sequence in a bucket, which bounds the padding."""

_UNSUPPORTED = ("softcap", "position_bias", "chunk_size")
"""Keyword arguments with which HF models ask for more than causal attention with windows and sinks."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PaddedLayout:
    """Positions of U computed tokens in N padded slots, ordered by bucket, then by sequence."""

    shapes: tuple[tuple[int, int, int], ...]
    """(sequences, queries of each, keys of each) of each bucket."""
    token_of_slot: Tensor
    """int64 `[N]`; padding slots repeat token 0."""
    slot_of_token: Tensor
    """int64 `[U]`."""
    filled: Tensor
    """bool `[N]`, false for padding slots."""


@dataclass(frozen=True)
class SharedRows:
    """`data.batches.shared_prefix.PrefixSharing` on the device: U computed rows represent T tokens."""

    token_of_row: Tensor
    """int64 `[U]`."""
    row_of_token: Tensor
    """int64 `[T]`."""
    row_of_key: Tensor
    """int64 `[K]`: the computed row of each key, or of each padded slot of keys."""
    mask: Tensor | None
    """`[L, M]` of the largest bucket, additive: its last query sees all keys, the one before it all but the
    last, and so on. The last rows and columns are the mask of a smaller one. None for a kernel without."""


@dataclass(frozen=True)
class PackedLayout:
    """Positions of the sequences of one forward pass; made once for all layers."""

    kernel: AttentionKernel
    cumulative: tuple[Tensor, Tensor]
    """int32 `[S + 1]` both: where the queries, and where the keys of each sequence begin."""
    longest: tuple[int, int]
    """Most queries, and most keys of a sequence."""
    padding: PaddedLayout | None
    """None if all sequences have one length, or the kernel needs no padding."""
    shared: SharedRows | None = None
    """Set if q, k and v arrive as U rows, where sequences of one group share the rows of their prefix."""

    @classmethod
    def of(
        cls,
        lengths: Rows,
        device: torch.device | str,
        dtype: torch.dtype,
        sharing: PrefixSharing | None = None,
    ) -> PackedLayout:
        """Lay out sequences of lengths int64 `[S]`, each at least 1, on the host.

        The kernel depends on the dtype of q, k and v. `sharing` has the rows of shared prefixes; None if
        there are none.
        """
        kernel = kernel_of(torch.device(device), dtype)
        pads = kernel is AttentionKernel.SDPA
        queries, keys, rows = lengths, lengths, None
        if sharing is not None:
            queries, keys, rows = _own_tokens(lengths, sharing)
        longest = int(queries.max()), int(keys.max())  # host: numpy
        is_uniform = bool((queries == longest[1]).all())  # host: numpy
        padding, shared = None, None
        if pads and not is_uniform:
            padding, rows = _padded_layout(queries, keys, rows, device)
        if sharing is not None:
            assert rows is not None
            shared = SharedRows(
                token_of_row=to_device(torch.from_numpy(sharing.token_of_row), device),
                row_of_token=to_device(torch.from_numpy(sharing.row_of_token), device),
                row_of_key=to_device(torch.from_numpy(rows), device),
                mask=_answer_mask(queries, keys, device, dtype) if pads else None,
            )
        starts = (np.concatenate(([0], np.cumsum(sizes))).astype(np.int32) for sizes in (queries, keys))
        first, second = (to_device(torch.from_numpy(of_sequence), device) for of_sequence in starts)
        return cls(kernel, (first, second), longest, padding, shared)


def _own_tokens(lengths: Rows, sharing: PrefixSharing) -> tuple[Rows, Rows, Rows]:
    """Return the queries and keys of the sequences that have tokens of their own, and the row of each key."""
    sequence_of_token = np.repeat(np.arange(len(lengths)), lengths)
    queries = np.bincount(sequence_of_token[sharing.token_of_row], minlength=len(lengths))
    kept = queries > 0
    return queries[kept], lengths[kept], sharing.row_of_token[kept[sequence_of_token]]


def _answer_mask(queries: Rows, keys: Rows, device: torch.device | str, dtype: torch.dtype) -> Tensor | None:
    """Return `SharedRows.mask`; None if every sequence has queries for all of its keys."""
    answers = keys > queries
    if not answers.any():
        return None
    num_queries, num_keys = int(queries[answers].max()), int(keys[answers].max())
    positions = torch.arange(num_keys - num_queries, num_keys, device=device)
    return additive_mask(positions, num_keys, dtype)[:, 0, 0]


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

    Dropout is never applied. With shared prefixes, T is U on both sides.

    Raises:
        BackendError: if the model asks for more than causal attention with windows and sinks.
    """
    reach = reach_of(module, kwargs)
    if packed_layout is None:
        raise BackendError(f"{type(module).__name__} was called without packed_layout")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # The output has the order of q in memory. If that is not `[T, H, d]`, it is copied later, and kept twice.
    return attend(q.contiguous(), k, v, packed_layout, scaling, reach)[None], None


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
    """Compute causal attention within each sequence: q `[U, H, d]` -> `[U, H, d]`.

    k and v have H heads or a divisor of H. Without shared prefixes, U is T.
    """
    shared = layout.shared
    if layout.kernel is AttentionKernel.SDPA:
        return _padded(q, k, v, layout, scaling, reach)
    if shared is not None:
        k, v = (x.index_select(0, shared.row_of_key) for x in (k, v))
    return varlen_attention(layout.kernel, q, k, v, layout.cumulative, layout.longest, scaling, reach)


AttentionInterface.register(PACKED, packed_attention)


def _padded(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scaling: float | None, reach: Reach
) -> Tensor:
    """Compute `[U, H, d]` with causal SDPA over right-padded buckets."""
    padding, shared = layout.padding, layout.shared
    if padding is None:
        length, num_keys = layout.longest
        assert length == num_keys, "queries for a part of the keys are padded"
        assert len(q) % length == 0, f"a layout for another dtype than {q.dtype}"
        return _causal(q, k, v, (len(q) // length, length, length), scaling, reach)
    of_queries, of_keys = zip(*((num * own, num * seen) for num, own, seen in padding.shapes), strict=True)
    slots = [_pad(x, padding) if shared is None else x.index_select(0, shared.row_of_key) for x in (k, v)]
    queries, (keys, values) = _pad(q, padding).split(of_queries), (x.split(of_keys) for x in slots)
    mask = None if shared is None else shared.mask
    buckets = [
        _causal(query, key, value, shape, scaling, reach, mask)
        for query, key, value, shape in zip(queries, keys, values, padding.shapes, strict=True)
    ]
    return _unpad(torch.cat(buckets), padding)


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: tuple[int, int, int],
    scaling: float | None,
    reach: Reach,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of S sequences: q `[S * L, H, d]`, k and v `[S * M, H, d]` -> `[S * L, H, d]`.

    `mask` is that of a larger bucket, `SharedRows.mask`, if there are more keys than queries.
    """
    num, queries, keys = shape
    query = q.reshape(num, queries, *q.shape[1:]).transpose(1, 2)
    key, value = (x.reshape(num, keys, *x.shape[1:]).transpose(1, 2) for x in (k, v))
    if mask is not None:
        mask = mask[len(mask) - queries :, mask.shape[1] - keys :] if keys > queries else None
    out = reaching_attention(query, key, value, scaling, reach, mask)
    return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])


class _Pad(torch.autograd.Function):
    """Copy packed tokens to padded slots: `[U, ...]` -> `[N, ...]`.

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
    """Copy padded slots back to packed tokens: `[N, ...]` -> `[U, ...]`. Padding gets gradient 0."""

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


def _padded_layout(
    queries: Rows, keys: Rows, row_of_key: Rows | None, device: torch.device | str
) -> tuple[PaddedLayout, Rows | None]:
    """Split sequences into buckets by the length of their shared prefix, and by decreasing number of queries.

    Index tables are made on the host and then moved.

    Args:
        queries: int64 `[S]`, the own tokens of each sequence.
        keys: int64 `[S]`, all of its tokens.
        row_of_key: the row of each of them; None if these are the rows in order.

    Returns:
        The layout, and the row of each slot of keys.
    """
    prefixes = keys - queries
    order = np.lexsort((-queries, prefixes))
    shapes, tokens, filled, slots_of_keys = [], [], [], []
    while len(order):
        prefix, width = int(prefixes[order[0]]), int(queries[order[0]])
        fits = (prefixes[order] == prefix) & (queries[order] >= _MIN_LENGTH_RATIO * width)
        size = int(np.argmin(np.append(fits, np.False_)))
        sequences, order = order[:size], order[size:]
        slots, is_filled = _slots(queries, sequences, width)
        tokens.append(slots)
        filled.append(is_filled)
        slots_of_keys.append(_slots(keys, sequences, prefix + width)[0])
        shapes.append((size, width, prefix + width))
    token_of_slot, mask = np.concatenate(tokens), np.concatenate(filled)
    slot_of_token = np.empty(int(queries.sum()), dtype=np.int64)
    slot_of_token[token_of_slot[mask]] = np.flatnonzero(mask)
    padding = PaddedLayout(
        tuple(shapes),
        to_device(torch.from_numpy(token_of_slot), device),
        to_device(torch.from_numpy(slot_of_token), device),
        to_device(torch.from_numpy(mask), device),
    )
    return padding, None if row_of_key is None else row_of_key[np.concatenate(slots_of_keys)]


def _slots(lengths: Rows, sequences: Rows, width: int) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Return the token in each slot of sequences padded to a width, 0 for padding, and which are filled."""
    steps, starts = np.arange(width), np.cumsum(lengths) - lengths
    within = steps < lengths[sequences, None]
    return np.where(within, starts[sequences, None] + steps, 0).ravel(), within.ravel()
