"""Attention over a packed step, in the form that Hugging Face models call.

A step's rows are packed without padding: rows 0 .. B-1 are the last tokens of the running
sequences (slots 0 .. B-1 of the cache), the prompts that enter follow. Further rows, if any,
only fill the matrix products up and attend to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from hflow.backends.embedded_engine.cache import KVCache
from hflow.errors import BackendError

ATTENTION = "hflow_embedded"
"""The name under which models find `attend`. No mask function has this name, so that models
build no mask."""

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class PromptBucket:
    """Prompts of similar length (n of them), padded to one length L for their attention only."""

    rows: Tensor
    """int64 `[n, L]`: the step's row of each prompt token, any row where there is none."""
    filled: Tensor
    """int64 `[m]`: which of the `n * L` entries are tokens."""
    targets: Tensor
    """int64 `[m]`: the rows of these tokens."""


@dataclass(frozen=True)
class PackedStep:
    """What attention must know of one step. N is the number of tokens stored in the cache."""

    cache: KVCache
    num_decoding: int
    """B."""
    cached_length: int
    """Length that the B decoding rows attend over, padded."""
    decode_mask: Tensor | None
    """Additive `[B, 1, 1, cached_length]`."""
    stored_rows: Tensor | None
    """int64 `[N]`: the row of each stored token, repeated over a group's members; None where
    every row is stored once, in order."""
    stored_slots: Tensor
    """int64 `[N]`."""
    stored_positions: Tensor
    """int64 `[N]`."""
    buckets: tuple[PromptBucket, ...] = ()


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
    """Store the step's keys and values, and attend.

    Args:
        module: the layer's attention module; its `layer_idx` names the cache's layer.
        query: `[1, heads, rows, head_dim]`.
        key: `[1, kv_heads, rows, head_dim]`.
        value: as `key`.
        attention_mask: unused; the step knows what each row sees.
        packed_step: the step, handed through the model's forward.
        scaling: factor of the scores.
        kwargs: whatever else the architecture passes.

    Returns:
        `[1, rows, heads, head_dim]`, and None for the attention weights.

    Raises:
        BackendError: when the architecture asks for more than causal attention.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise BackendError(
                f"the embedded engine has plain causal attention only, {type(module).__name__} asks for {name}"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    _store(packed_step, layer, keys, values)
    out = values.new_zeros(len(queries), queries.shape[1], values.shape[-1])
    if packed_step.num_decoding:
        out[: packed_step.num_decoding] = _decode(packed_step, layer, queries, scale)
    for bucket in packed_step.buckets:
        attended = _prefill(bucket, queries, keys, values, scale)
        out.index_copy_(0, bucket.targets, attended)
    return out[None], None


def _store(step: PackedStep, layer: int, keys: Tensor, values: Tensor) -> None:
    if step.stored_rows is None:
        num_stored = len(step.stored_slots)
        keys, values = keys[:num_stored], values[:num_stored]
    else:
        keys, values = keys[step.stored_rows], values[step.stored_rows]
    step.cache.write(layer, step.stored_slots, step.stored_positions, keys, values)


def _decode(step: PackedStep, layer: int, queries: Tensor, scale: float) -> Tensor:
    """One query a sequence over its slot `[B, heads, head_dim]`.

    Query heads that share keys become rows of one product, which saves repeating the keys.
    """
    keys, values = step.cache.view(layer, step.num_decoding, step.cached_length)
    grouped = queries[: step.num_decoding].reshape(step.num_decoding, keys.shape[1], -1, queries.shape[-1])
    assert step.decode_mask is not None
    if grouped.dtype is torch.float32:
        # Twice as fast as SDPA's CPU kernel, which is written for many queries a sequence.
        scores = torch.matmul(grouped * scale, keys.transpose(2, 3)).add_(step.decode_mask)
        out = torch.matmul(scores.softmax(-1), values)
    else:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=step.decode_mask, scale=scale)
    return out.reshape(step.num_decoding, queries.shape[1], -1)


def _prefill(bucket: PromptBucket, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention inside each prompt of a bucket `[m, heads, head_dim]`.

    Padding stands behind the tokens, where causality keeps it from their sight.
    """
    padded = [x[bucket.rows].transpose(1, 2) for x in (queries, keys, values)]
    shared = queries.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(*padded, is_causal=True, scale=scale, enable_gqa=shared)
    return out.transpose(1, 2).flatten(0, 1)[bucket.filled]


AttentionInterface.register(ATTENTION, attend)
