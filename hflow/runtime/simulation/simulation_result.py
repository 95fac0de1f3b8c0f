"""What a simulated run did: times, staleness, idle devices. Frozen rows, and the books they come from."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hflow.runtime.events import Finish, FormBatch, Refuse
from hflow.workers.interface import Span


@dataclass(frozen=True)
class Timeline:
    """When things happened, in seconds from the run's start."""

    spans: tuple[Span, ...]
    """Batch nodes and the publishing of weights, on the lane of their device group, and engines' waking
    times, on their own."""
    step_ends: tuple[float, ...]
    """When each step was complete."""
    finish: Finish

    def period(self) -> float:
        """Seconds a step in the steady state: the first steps fill the pipeline, the last ones drain it.

        Raises:
            ValueError: fewer than four steps.
        """
        start, end = self.window()
        first, last = _middle(self.step_ends)
        return (end - start) / (last - first)

    def window(self) -> tuple[float, float]:
        """Start and end of the middle half of the steps.

        Raises:
            ValueError: fewer than four steps.
        """
        first, last = _middle(self.step_ends)
        return self.step_ends[first], self.step_ends[last]


@dataclass(frozen=True)
class LagRow:
    """Trained samples by how far the weights moved on since their oldest token."""

    in_flight: int
    """Versions from the oldest token to the sample's end."""
    in_queue: int
    """Versions from there to the step that trained it."""
    num_samples: int


@dataclass(frozen=True)
class SimulatedRun:
    """A run on a virtual clock, with what its devices and samples went through."""

    timeline: Timeline
    samples_per_second: float
    """Trained samples in the steady state."""
    idle: tuple[tuple[str, float], ...]
    """Device group, or engine with devices of its own -> share of the steady state in which nothing runs."""
    mean_generating: float
    """Samples that generate at once in the steady state, on average."""
    lags: tuple[LagRow, ...]
    """Sorted; empty for streams without versions."""
    interruptions: int
    """How often a sample that generated gave way to new weights or to training."""
    seconds_kept: float
    """Seconds of generation that samples had behind them when they gave way, and kept."""
    refused: tuple[tuple[str, int], ...]
    """Reason -> samples that were refused or dropped."""
    generating: tuple[Span, ...]
    """When each engine had a sample to work on, on its own lane or that of the group that it shares."""

    def staleness(self) -> dict[int, int]:
        """Lag -> trained samples."""
        total: Counter[int] = Counter()
        for row in self.lags:
            total[row.in_flight + row.in_queue] += row.num_samples
        return dict(sorted(total.items()))


class Books:
    """What is written down during a simulated run."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.step_ends: list[float] = []
        self.interruptions = 0
        self.seconds_kept = 0.0
        self._stretches: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
        self._versions: dict[int, tuple[int, int]] = {}
        self._lags: Counter[tuple[int, int]] = Counter()
        self._refused: Counter[str] = Counter()
        self._num_trained = 0

    def generated(self, replicas: tuple[str, ...], start: float, end: float) -> None:
        """A sample generated on these engines without a break."""
        self._stretches[replicas].append((start, end))

    def interrupted(self, seconds: float) -> None:
        """A sample gave way that had so many seconds of generation behind it."""
        self.interruptions += 1
        self.seconds_kept += seconds

    def sampled(self, sample: int, oldest: int, newest: int) -> None:
        """A sample of the trained stream is finished, under the weights of version `newest`."""
        self._versions[sample] = (oldest, newest)

    def formed(self, what: FormBatch) -> None:
        """A batch of the trained stream."""
        for sample in what.samples:
            oldest, newest = self._versions.pop(sample)
            self._num_trained += 1
            if oldest >= 0:
                self._lags[newest - oldest, what.step - newest] += 1

    def refused(self, what: Refuse) -> None:
        """Samples of the trained stream left the run."""
        self._refused[what.reason.value] += len(what.samples)
        for sample in what.samples:
            self._versions.pop(sample, None)

    def timeline(self, finish: Finish) -> Timeline:
        """The times alone."""
        return Timeline(tuple(self.spans), tuple(self.step_ends), finish)

    def close(
        self, finish: Finish, lanes: Sequence[str], homes: Mapping[str, str], samples_a_step: int
    ) -> SimulatedRun:
        """Everything.

        Args:
            finish: how the run ended.
            lanes: the device groups, beside which engines with devices of their own are listed.
            homes: engine -> the device group that it shares.
            samples_a_step: samples of a batch.
        """
        timeline = self.timeline(finish)
        window = timeline.window()
        seconds = window[1] - window[0]
        generating = tuple(self._generating(homes))
        busy: dict[str, list[tuple[float, float]]] = {lane: [] for lane in lanes}
        for span in self.spans:
            if span.lane in busy:
                busy[span.lane].append((span.start, span.end))
        for span in generating:
            busy.setdefault(span.lane, []).append((span.start, span.end))
        spent = sum(_length(stretch, window) for part in self._stretches.values() for stretch in part)
        return SimulatedRun(
            timeline=timeline,
            samples_per_second=samples_a_step / timeline.period(),
            idle=tuple(
                (lane, max(0.0, 1 - _covered(spans, window) / seconds)) for lane, spans in busy.items()
            ),
            mean_generating=spent / seconds,
            lags=tuple(LagRow(*lag, num) for lag, num in sorted(self._lags.items())),
            interruptions=self.interruptions,
            seconds_kept=self.seconds_kept,
            refused=tuple(sorted(self._refused.items())),
            generating=generating,
        )

    def _generating(self, homes: Mapping[str, str]) -> Iterator[Span]:
        """When samples generated, by engine; stretches that touch are one."""
        by_engine: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for replicas, stretches in self._stretches.items():
            for replica in replicas:
                by_engine[replica].extend(stretches)
        for replica, stretches in by_engine.items():
            for start, end in _merged(stretches):
                yield Span(replica, homes.get(replica, replica), start, end, {})


def _middle(step_ends: Sequence[float]) -> tuple[int, int]:
    num_steps = len(step_ends)
    if num_steps < 4:
        raise ValueError(f"a period needs at least four steps, and {num_steps} were simulated")
    return num_steps // 4, 3 * num_steps // 4


def _length(stretch: tuple[float, float], window: tuple[float, float]) -> float:
    return max(0.0, min(stretch[1], window[1]) - max(stretch[0], window[0]))


def _covered(stretches: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    """Seconds of a window in which something runs."""
    return sum(_length(stretch, window) for stretch in _merged(stretches))


def _merged(stretches: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The union of stretches of time, in parts that do not touch."""
    first, last = math.inf, -math.inf
    for start, end in sorted(stretches):
        if start > last:
            if first < last:
                yield first, last
            first = start
        last = max(last, end)
    if first < last:
        yield first, last
