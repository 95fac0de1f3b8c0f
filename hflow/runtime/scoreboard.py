"""Collects what a step reports and hands it on as one flat row of numbers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from hflow.runtime.events import Refusal
from hflow.workers.base import Span


class Observer(Protocol):
    """Where rows and spans go: files, a live display, a test."""

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """A training step is complete."""
        ...

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """A side stream was evaluated with the weights of `step` completed steps."""
        ...

    def on_refusal(self, node: str, reason: Refusal, message: str) -> None:
        """A node refused samples; `message` is what its body failed with, or empty."""
        ...

    def on_span(self, worker: int, span: Span) -> None:
        """A worker (-1: the controller) did something."""
        ...


class Scoreboard:
    """Metrics of the steps in flight, and the counters between steps."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, float]] = {}
        self._refused: Counter[str] = Counter()
        self._generated = 0
        self._last = time.monotonic()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to a step's row."""
        self._rows.setdefault(step, {}).update(values)

    def refused(self, reason: Refusal) -> None:
        """Count a refusal against the step that completes next."""
        self._refused[reason.value] += 1

    def generated(self, num_tokens: int) -> None:
        """Count generated tokens."""
        self._generated += num_tokens

    def close(self, step: int) -> dict[str, float]:
        """The finished row of a step, with time and throughput since the step before."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        row = self._rows.pop(step, {})
        row["time/step_seconds"] = seconds
        row["time/generated_tokens_per_second"] = self._generated / seconds
        if tokens := row.get("batch/tokens"):
            row["time/tokens_per_second"] = tokens / seconds
        if samples := row.get("batch/samples"):
            row["time/samples_per_second"] = samples / seconds
        for reason in sorted(self._refused):
            row[f"refused/{reason}"] = self._refused[reason]
        self._generated = 0
        self._refused.clear()
        return dict(sorted(row.items()))


def means(parts: list[dict[str, tuple[float, int]]]) -> dict[str, float]:
    """Join sums and counts from several workers into means."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for part in parts:
        for name, (total, count) in part.items():
            sums[name] += total  # type: ignore[assignment]
            counts[name] += count
    return {name: sums[name] / counts[name] for name in sorted(counts) if counts[name]}
