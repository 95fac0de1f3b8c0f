"""Attention over a packed step, with the interface that Hugging Face models call.

The rows of a step are packed without padding. Rows 0 .. B-1 are the last tokens of the running sequences,
which have numbers 0 .. B-1 in the cache. The entering prompts follow. Further rows only fill up the matrix
products and attend to nothing.

Axes: B decoding sequences, N tokens stored in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from hflow.engines.embedded.cache import CachedAttention, KVCache
from hflow.models.attention_kernels import CAUSAL, Reach, StoredHeads
from hflow.models.packed_attention import PackedLayout, reach_of
from hflow.models.packed_attention import attend as attend_packed

ATTENTION = "hflow_embedded"
"""Name of this attention for `attn_implementation`. No mask function has this name, so HF builds no mask."""


@dataclass(frozen=True)
class PackedStep:
    """Inputs of attention in one step."""

    cache: KVCache
    num_decoding: int
    """B."""
    stored_blocks: Tensor
    """int64 `[N]`: where in the cache tokens are stored."""
    stored_offsets: Tensor
    """int64 `[N]`: the offset of each in its block."""
    max_length: int
    """No row has a position beyond this many tokens."""
    stored_rows: Tensor | None = None
    """int64 `[N]`: the row of each stored token, repeated where members of a prompt group store it each. None
    if rows 0 .. N-1 are stored in order."""
    decoding: CachedAttention | None = None
    """Attention of the B decoding rows; None if there are none."""
    num_prompt_rows: int = 0
    """Rows of the entering prompts, after the B decoding rows."""
    prompts: PackedLayout | None = None
    """Layout of the entering prompts, counted from the first of their rows; None if there are none."""

    def stored_heads(self, layer: int) -> StoredHeads | None:
        """Return the places of a layer's keys and values; None if they are not those of the first rows."""
        if self.stored_rows is not None:
            return None
        return StoredHeads(*self.cache.layer(layer), self.stored_blocks, self.stored_offsets)


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
        value: the values, as `key`; of another size in latent attention.

    Returns:
        `[1, rows, heads, head_dim]`, and None for the attention weights.

    Raises:
        BackendError: if the architecture asks for more than causal attention with windows and sinks.
    """
    reach = reach_of(module, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return attend_rows(packed_step, layer, q, k, v, scale, reach)[None], None


def attend_rows(
    step: PackedStep,
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    reach: Reach = CAUSAL,
    is_stored: bool = False,
) -> Tensor:
    """Store the keys and values of one layer in the cache, and attend.

    Args:
        queries: `[rows, heads, head_dim]`.
        keys: `[rows, kv_heads, head_dim]`.
        values: the values, as `keys`; of another size in latent attention.
        is_stored: whether keys and values are in the cache already.

    Returns:
        `[rows, heads, head_dim]`, 0 in rows that only fill up.
    """
    if not is_stored:
        _store(step, layer, keys, values)
    first, last = step.num_decoding, step.num_decoding + step.num_prompt_rows
    if first == len(queries):
        return _decode(step, layer, queries, scale, reach)
    out = queries.new_zeros(*queries.shape[:2], values.shape[-1])
    if first:
        out[:first] = _decode(step, layer, queries[:first], scale, reach)
    if step.prompts is not None:
        q, k, v = (x[first:last] for x in (queries, keys, values))
        out[first:last] = attend_packed(q, k, v, step.prompts, scale, reach)
    return out


def _store(step: PackedStep, layer: int, keys: Tensor, values: Tensor) -> None:
    if step.stored_rows is None:
        num_stored = len(step.stored_blocks)
        keys, values = keys[:num_stored], values[:num_stored]
    else:
        keys, values = keys[step.stored_rows], values[step.stored_rows]
    step.cache.write(layer, step.stored_blocks, step.stored_offsets, keys, values)


def _decode(step: PackedStep, layer: int, queries: Tensor, scale: float, reach: Reach) -> Tensor:
    """Attend from one query per running sequence over its cached tokens: `[B, heads, head_dim]`."""
    assert step.decoding is not None
    return step.decoding.attend(queries, *step.cache.layer(layer), scale, reach)


AttentionInterface.register(ATTENTION, attend)
