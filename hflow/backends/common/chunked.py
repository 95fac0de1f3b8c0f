"""Functions of many logits, applied to a part of the rows at a time.

Full fp32 logits `[N, V]` of a long batch and a large vocabulary would be the largest tensor of a
step by far; no more than one chunk of them exists at any time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_PER_CHUNK = 1 << 26
"""Logits that exist at once: 256 MiB in fp32."""


def in_chunks(
    step: Callable[..., tuple[Tensor, ...]], vocabulary_size: int, rows: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    """Apply `step` to chunks of rows; what it keeps for the backward pass is computed again there.

    Args:
        step: makes tensors `[C, ...]` of C rows and the same rows of `others`, by way of logits.
        vocabulary_size: logits of a row, on this rank.
        rows: tensor `[N, ...]`.
        others: tensors `[N, ...]`.

    Returns:
        The tensors of `step`, N rows each.
    """
    size = max(LOGITS_PER_CHUNK // vocabulary_size, 1)
    if len(rows) <= size:
        return step(rows, *others)
    chunks = zip(*(torch.split(x, size) for x in (rows, *others)), strict=True)
    parts = [
        checkpoint(step, *chunk, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else step(*chunk)
        for chunk in chunks
    ]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))
