"""Attention over a packed step, with the interface that Hugging Face models call.

The rows of a step are packed without padding. Rows 0 .. B-1 are the last tokens of the running sequences,
which have slots 0 .. B-1 of the cache. The entering prompts follow. Further rows only fill up the matrix
products and attend to nothing.

Axes: B decoding sequences, N tokens stored in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from hflow.backends.embedded_engine.cache import KVCache, LengthBand
from hflow.backends.packed_attention import PackedLayout, packed_attention

ATTENTION = "hflow_embedded"
"""Name of this attention for `attn_implementation`. No mask function has this name, so HF builds no mask."""


@dataclass(frozen=True)
class PackedStep:
    """Inputs of attention in one step."""

    cache: KVCache
    num_decoding: int
    """B."""
    bands: tuple[LengthBand, ...]
    """The length bands of the B decoding rows."""
    decode_mask: Tensor | None
    """Additive mask `[B, 1, 1, longest band]`."""
    stored_rows: Tensor | None
    """int64 `[N]`: the row of each stored token, repeated for each member of a prompt group. None if rows 0
    .. N-1 are stored in order."""
    stored_slots: Tensor
    """int64 `[N]`."""
    stored_positions: Tensor
    """int64 `[N]`."""
    num_prompt_rows: int
    """Rows of the entering prompts, after the B decoding rows."""
    prompts: PackedLayout | None
    """Layout of the entering prompts, counted from the first of their rows; None if there are none."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_step: PackedStep,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store the step's keys and values in the cache, and attend.

    Args:
        module: the layer's attention module; its `layer_idx` selects the cache's layer.
        query: `[1, heads, rows, head_dim]`.
        key: `[1, kv_heads, rows, head_dim]`.
        value: as `key`.
        attention_mask: unused; the step determines what each row sees.
        packed_step: the step, passed through the model's forward.
        scaling: factor of the scores.
        kwargs: other arguments of the architecture.

    Returns:
        `[1, rows, heads, head_dim]`, and None for the attention weights.

    Raises:
        BackendError: if the architecture asks for more than causal attention.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    _store(packed_step, layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    first, last = packed_step.num_decoding, packed_step.num_decoding + packed_step.num_prompt_rows
    out = value.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    if first:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        queries = query[0, :, :first].transpose(0, 1)
        for band in packed_step.bands:
            out[band.first : band.last] = _decode(packed_step, layer, band, queries, scale)
    if packed_step.prompts is not None:
        q, k, v = (x[:, :, first:last] for x in (query, key, value))
        attended, _ = packed_attention(module, q, k, v, None, scaling, packed_step.prompts, **kwargs)
        out[first:last] = attended[0]
    return out[None], None


def _store(step: PackedStep, layer: int, keys: Tensor, values: Tensor) -> None:
    if step.stored_rows is None:
        num_stored = len(step.stored_slots)
        keys, values = keys[:num_stored], values[:num_stored]
    else:
        keys, values = keys[step.stored_rows], values[step.stored_rows]
    step.cache.write(layer, step.stored_slots, step.stored_positions, keys, values)


def _decode(step: PackedStep, layer: int, band: LengthBand, queries: Tensor, scale: float) -> Tensor:
    """Attend from one query per sequence over its slot, for the sequences of one band.

    Query heads that share keys become rows of one product, so that keys need not be repeated.
    """
    assert step.decode_mask is not None
    first, last, length = band
    keys, values = step.cache.view(layer, first, last, length)
    mask = step.decode_mask[first:last, :, :, :length]
    grouped = queries[first:last].reshape(last - first, keys.shape[1], -1, queries.shape[-1])
    if grouped.dtype is torch.float32:
        # Twice as fast as SDPA's CPU kernel, which is made for many queries per sequence.
        scores = torch.matmul(grouped * scale, keys.transpose(2, 3)).add_(mask)
        out = torch.matmul(scores.softmax(-1), values)
    else:
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(last - first, queries.shape[1], -1)


AttentionInterface.register(ATTENTION, attend)
