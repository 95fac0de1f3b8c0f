"""Functions of logits, computed on some rows at a time.

fp32 logits `[N, V]` of all rows would be by far the largest tensor of a step. Only one chunk of them exists
at any time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_PER_CHUNK = 1 << 26
"""Logits in a chunk: 256 MiB in fp32."""


def in_chunks(
    step: Callable[..., tuple[Tensor, ...]], vocab_size: int, rows: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    """Apply `step` to chunks of rows. The backward pass recomputes each chunk instead of storing it.

    Args:
        step: takes C rows of `rows` and of each of `others`, computes their logits, and returns tensors
            `[C, ...]`.
        vocab_size: number of logits per row, on this rank.
        rows: tensor `[N, ...]`.
        others: tensors `[N, ...]`.

    Returns:
        The tensors of `step`, N rows each.
    """
    size = max(LOGITS_PER_CHUNK // vocab_size, 1)
    if len(rows) <= size:
        return step(rows, *others)
    chunks = zip(*(torch.split(x, size) for x in (rows, *others)), strict=True)
    results = [
        checkpoint(step, *chunk, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else step(*chunk)
        for chunk in chunks
    ]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
