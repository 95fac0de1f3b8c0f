"""Measures of logits without the logits: chunk by chunk, recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hflow.backends.common.chunks import in_chunks

Measure = Callable[..., tuple[Tensor, ...]]
"""From log-probs `[C, V]` and rows of the extra inputs to tensors of C rows."""


@dataclass(frozen=True)
class WholeLogits:
    """`common.output.Logits` by an output matrix that this rank has whole."""

    rows: Tensor
    """Hidden states `[N, D]`."""
    head: nn.Module
    """The output matrix, `[N, D]` -> `[N, V]`."""
    temperature: float
    """Logits are divided by it."""

    def measure(self, names: Sequence[str], ids: Tensor) -> Sequence[Tensor]:
        """Some of `logprobs` and `entropy`, in one pass."""

        def of(logprobs: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            measures = {"logprobs": lambda: _picked(logprobs, ids), "entropy": lambda: _entropy(logprobs)}
            return tuple(measures[name]() for name in names)

        return self._apply(of, ids)

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest tokens and their log-probs."""
        ids, logprobs = self._apply(lambda logprobs: logprobs.topk(k, dim=-1)[::-1])
        return ids, logprobs

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Log-probs of given tokens."""
        (found,) = self._apply(lambda logprobs, rows: (logprobs.gather(-1, rows),), ids)
        return found

    def _apply(self, of: Measure, *extra: Tensor) -> tuple[Tensor, ...]:
        """Apply `of` to the log-softmax of the logits."""

        def step(hidden: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            logits = self.head(hidden).float()
            if self.temperature != 1.0:
                logits = logits / self.temperature
            return of(torch.log_softmax(logits, dim=-1), *others)

        return in_chunks(step, _vocabulary_size(self.head), self.rows, *extra)


def _vocabulary_size(head: nn.Module) -> int:
    """V, the rows of the output matrix."""
    assert isinstance(head.weight, Tensor)
    return len(head.weight)


def _picked(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of given ids: `[C, V]`, `[C]` -> `[C]`."""
    return logprobs.gather(-1, ids[:, None]).squeeze(-1)


def _entropy(logprobs: Tensor) -> Tensor:
    """Entropy in nats of each row: `[C, V]` -> `[C]`."""
    return -(logprobs.exp() * logprobs).sum(-1)
