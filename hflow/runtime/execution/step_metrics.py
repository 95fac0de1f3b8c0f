"""Collects what a step reports and hands it on as one flat row of numbers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from hflow.runtime.events import Refusal
from hflow.types import EpisodeState
from hflow.workers.interface import EngineStats, Report, SampleReady, Span

# -------------------- `StalenessMetrics`: how stale the samples of a batch are, in flight and in the queue.
# The lag of a token is the step that trains it less the version of the weights that drew it. A sample's is
# that
# of its oldest token, and has two parts: what the weights moved on while it was drawn (from its oldest
# token to
# its newest), and while it waited (from its newest token to its step).


class StalenessMetrics:
    """The versions of one stream's samples between their arrival and their step."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[int, int]] = {}
        """Sample -> versions of its oldest and its newest token; not of samples without generated tokens."""

    def arrive(self, sample: int, oldest: int, newest: int) -> None:
        """A sample was generated."""
        if oldest >= 0:
            self._versions[sample] = oldest, newest

    def forget(self, samples: Iterable[int]) -> None:
        """Samples that will not be trained."""
        for sample in samples:
            self._versions.pop(sample, None)

    def bind(self, samples: Iterable[int], step: int) -> dict[str, float]:
        """What a step's row says of the samples that it trains; they are forgotten.

        Means over samples of the whole lag and of its parts, its maximum, and the histograms of all three:
        `staleness/lag_N`, `in_flight_N` and `in_queue_N` are shares of samples.
        """
        aged = [self._versions.pop(sample) for sample in samples if sample in self._versions]
        if not aged:
            return {}
        lags = [step - oldest for oldest, _ in aged]
        in_flight = [newest - oldest for oldest, newest in aged]
        in_queue = [step - newest for _, newest in aged]
        return {
            "staleness/mean": sum(lags) / len(aged),
            "staleness/in_flight": sum(in_flight) / len(aged),
            "staleness/in_queue": sum(in_queue) / len(aged),
            "staleness/max": float(max(lags)),
            **_shares("lag", lags),
            **_shares("in_flight", in_flight),
            **_shares("in_queue", in_queue),
        }


def _shares(name: str, lags: Sequence[int]) -> dict[str, float]:
    """A histogram: the share of each lag that occurs."""
    return {f"staleness/{name}_{lag}": num / len(lags) for lag, num in sorted(Counter(lags).items())}


# -------------------- `EpisodeCounts`: what the episodes of all workers do.


ENDED = EpisodeState.TERMINATED.value


class EpisodeCounts:
    """Episodes by state, as workers report them.

    Attributes:
        has_turns: whether any episode asked a model more than once. Until one did there is nothing to tell:
            of single completions it is known already how many run.
    """

    def __init__(self) -> None:
        self.has_turns = False
        self._latest: dict[int, Mapping[str, int]] = {}
        """Worker -> its last report."""
        self._sums: Counter[str] = Counter()
        self._num_reports = 0
        self._num_ended = 0
        """Episodes that had ended when the last row was closed."""

    def reported(self, worker: int, states: Mapping[str, int]) -> None:
        """A worker tells how many of its episodes are in each state; terminated are all that ever ended."""
        if states:
            self._latest[worker] = states
            self._sums.update(self.now())
            self._num_reports += 1

    def now(self) -> Counter[str]:
        """Episodes in each state, over all workers."""
        total: Counter[str] = Counter()
        for states in self._latest.values():
            total.update(states)
        return total

    def close(self) -> dict[str, float]:
        """What the row says of the time since the row before; empty for episodes of one turn.

        `episodes/STATE` is the mean over the moments at which workers reported (the last known numbers where
        none did), and `episodes/terminated` counts those that ended.
        """
        now, sums, num_reports = self.now(), self._sums, self._num_reports
        ended, self._num_ended = now[ENDED] - self._num_ended, now[ENDED]
        self._sums, self._num_reports = Counter(), 0
        if not self.has_turns:
            return {}
        means = {state: sums[state] / num_reports if num_reports else float(now[state]) for state in now}
        return {f"episodes/{state}": value for state, value in {**means, ENDED: float(ended)}.items()}


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


class StepMetrics:
    """Metrics of the steps in flight, and the counters between steps."""

    def __init__(self, num_engines: int, num_trainers: int) -> None:
        """Begin.

        Args:
            num_engines: engines, of whose time `busy/engines` is a share.
            num_trainers: workers that run batch nodes with models, of whose time `busy/trainers` is.
        """
        self._num_engines, self._num_trainers = num_engines, num_trainers
        self.ages = StalenessMetrics()
        self._rows: dict[int, dict[str, float]] = {}
        self._refused: Counter[str] = Counter()
        self._drawn = EngineStats()
        self._episodes = EpisodeCounts()
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
        self._drawn, self._moved = EngineStats(), 0
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
