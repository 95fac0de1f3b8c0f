"""Measures of logits without the logits: chunk by chunk, recomputed in the backward pass.

Full fp32 logits `[N, V]` of a long batch and a large vocabulary would be the largest tensor of a
step by far; no more than one chunk of them exists at any time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGITS_PER_CHUNK = 1 << 26
"""Logits that exist at once: 256 MiB in fp32."""

Measure = Callable[..., tuple[Tensor, ...]]
"""From log-probs `[C, V]` and rows of the extra inputs to tensors of C rows."""


def measure(
    rows: Tensor, head: nn.Module, temperature: float, of: Measure, *extra: Tensor
) -> tuple[Tensor, ...]:
    """Apply `of` to the log-softmax of `head(rows) / temperature`.

    Args:
        rows: hidden states `[N, D]`.
        head: the output matrix, `[N, D]` -> `[N, V]`.
        temperature: logits are divided by it.
        of: makes tensors `[C, ...]` of log-probs `[C, V]` and the same C rows of `extra`.
        extra: tensors `[N, ...]`.

    Returns:
        The tensors of `of`, N rows each.
    """

    def step(hidden: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        logits = head(hidden).float()
        if temperature != 1.0:
            logits = logits / temperature
        return of(torch.log_softmax(logits, dim=-1), *others)

    size = max(LOGITS_PER_CHUNK // vocabulary_size(head), 1)
    if len(rows) <= size:
        return step(rows, *extra)
    chunks = zip(torch.split(rows, size), *(torch.split(x, size) for x in extra), strict=True)
    parts = [
        checkpoint(step, *chunk, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else step(*chunk)
        for chunk in chunks
    ]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def vocabulary_size(head: nn.Module) -> int:
    """V, the rows of the output matrix."""
    assert isinstance(head.weight, Tensor)
    return len(head.weight)


def picked(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of given ids: `[C, V]`, `[C]` -> `[C]`."""
    return logprobs.gather(-1, ids[:, None]).squeeze(-1)


def entropy(logprobs: Tensor) -> Tensor:
    """Entropy in nats of each row: `[C, V]` -> `[C]`."""
    return -(logprobs.exp() * logprobs).sum(-1)
