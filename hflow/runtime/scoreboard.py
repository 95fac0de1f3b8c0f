"""Collects what a step reports and hands it on as one flat row of numbers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from hflow.runtime.ages import Ages
from hflow.runtime.census import Census
from hflow.runtime.events import Refusal
from hflow.workers.base import Drawn, Report, SampleReady, Span

PAUSE_SECONDS = 0.25
"""Least time from one glance at the rollout to the next."""


class Observer(Protocol):
    """Where rows and spans go: files, a live display, a test."""

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """A training step is complete."""
        ...

    def on_rollout(self, values: Mapping[str, float]) -> None:
        """The rollout as it stands now, between steps: `rollout/` and `episodes/` counts of this moment."""
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

    def __init__(self, num_engines: int, num_trainers: int) -> None:
        """Begin.

        Args:
            num_engines: engines, of whose time `busy/engines` is a share.
            num_trainers: workers that run batch nodes with models, of whose time `busy/trainers` is.
        """
        self._num_engines, self._num_trainers = num_engines, num_trainers
        self.ages = Ages()
        self._rows: dict[int, dict[str, float]] = {}
        self._refused: Counter[str] = Counter()
        self._drawn = Drawn()
        self._episodes = Census()
        self._moved = 0
        self._busy: Counter[int] = Counter()
        """Worker -> seconds that its device ran batch nodes."""
        self._last = self._glanced = time.monotonic()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to a step's row."""
        self._rows.setdefault(step, {}).update(values)

    def refused(self, reason: Refusal, num_samples: int) -> None:
        """Count samples that left against the step that completes next."""
        self._refused[f"{'dropped' if reason.is_drop else 'refused'}/{reason.value}"] += num_samples

    def reported(self, report: Report) -> None:
        """Count what a worker's engines and episodes did."""
        self._drawn += report.drawn
        self._episodes.reported(report.worker, report.episodes)

    def arrived(self, sample: SampleReady, *, is_trained: bool) -> None:
        """A source finished a sample, of the trained stream or of another."""
        if sample.num_turns > 1:
            self._episodes.has_turns = True
        if is_trained:
            self.ages.arrive(sample.sample, sample.oldest, sample.newest)

    def moved(self, num_samples: int) -> None:
        """Count samples that moved to another engine."""
        self._moved += num_samples

    def ran(self, worker: int, seconds: float) -> None:
        """Count the time of a batch node on a worker's device."""
        self._busy[worker] += seconds  # type: ignore[assignment]

    def glance(self, counts: Callable[[], Mapping[str, float]]) -> dict[str, float] | None:
        """The rollout of this moment, to show it; None so soon after the last glance."""
        now = time.monotonic()
        if now - self._glanced < PAUSE_SECONDS:
            return None
        self._glanced = now
        states = self._episodes.now() if self._episodes.has_turns else {}
        return {**counts(), **{f"episodes/{state}": float(num) for state, num in states.items()}}

    def close(self, step: int, counts: Mapping[str, float]) -> dict[str, float]:
        """The finished row of a step, with time and throughput since the step before.

        Args:
            step: which.
            counts: of the rollout as it stands.
        """
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        row = self._rows.pop(step, {})
        row["time/step_seconds"] = seconds
        row["time/generated_tokens_per_second"] = self._drawn.num_tokens / seconds
        row["busy/engines"] = self._drawn.seconds / seconds / max(1, self._num_engines)
        row["busy/trainers"] = sum(self._busy.values()) / seconds / max(1, self._num_trainers)
        if self._drawn.num_interrupted:
            row["rollout/interrupted"] = self._drawn.num_interrupted
            row["rollout/kept_tokens"] = self._drawn.num_kept
        if self._moved:
            row["rollout/moved"] = self._moved
        if tokens := row.get("batch/tokens"):
            row["time/tokens_per_second"] = tokens / seconds
        if samples := row.get("batch/samples"):
            row["time/samples_per_second"] = samples / seconds
        row.update({**self._refused, **counts, **self._episodes.close()})
        self._drawn, self._moved = Drawn(), 0
        self._busy.clear()
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
