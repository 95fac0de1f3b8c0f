"""What a simulated run did: times, staleness, idle devices.

`SimulationRecorder` collects it during the run and makes the frozen rows.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hflow.runtime.events import Finish, FormBatch, Refuse
from hflow.workers.interface import Span


@dataclass(frozen=True)
class Timeline:
    """The times of a run, in seconds from its start."""

    spans: tuple[Span, ...]
    """Batch nodes and the publishing of weights, on the lanes of their device groups; the times in which
    engines are awake, on lanes of their own."""
    step_ends: tuple[float, ...]
    """When each step was complete."""
    finish: Finish
    num_steps: int
    """Steps of the run, complete or not."""

    def period(self) -> float:
        """Return the seconds per step in the steady state, between filling and draining the pipeline.

        Raises:
            ValueError: fewer than four steps.
        """
        start, end = self.window()
        return (end - start) / len(self.steps())

    def steps(self) -> range:
        """Return the steps that count as the steady state: the middle half.

        Raises:
            ValueError: fewer than four steps.
        """
        return steady_steps(self.num_steps)

    def window(self) -> tuple[float, float]:
        """Return the start and end of the steps that count as the steady state.

        Raises:
            ValueError: fewer than four steps.
        """
        steps = self.steps()
        return self.step_ends[steps.start - 1], self.step_ends[steps.stop - 1]


def steady_steps(num_steps: int) -> range:
    """Return those steps of a run that count as the steady state: the middle half.

    Raises:
        ValueError: fewer than four steps.
    """
    if num_steps < 4:
        raise ValueError(f"only {num_steps} steps were simulated. Simulate at least four.")
    return range(num_steps // 4 + 1, 3 * num_steps // 4 + 1)


@dataclass(frozen=True)
class LagRow:
    """A number of trained samples with the same lag."""

    in_flight: int
    """Versions between the oldest token and the end of the sample."""
    in_queue: int
    """Versions between the end of the sample and the step that trained it."""
    num_samples: int


@dataclass(frozen=True)
class SimulatedRun:
    """The results of a run on a virtual clock."""

    timeline: Timeline
    samples_per_second: float
    """Trained samples in the steady state."""
    idle: tuple[tuple[str, float], ...]
    """Device group, or engine with its own devices -> share of the steady state in which nothing runs."""
    mean_generating: float
    """Samples that are generated at once in the steady state, on average."""
    lags: tuple[LagRow, ...]
    """Sorted; empty for streams without versions."""
    interruptions: int
    """How often a sample was interrupted for new weights or for training."""
    seconds_kept: float
    """Seconds of generation that interrupted samples had completed, and kept."""
    refused: tuple[tuple[str, int], ...]
    """Reason -> samples that were refused or dropped."""
    generating: tuple[Span, ...]
    """When each engine generated, on its own lane or on those of the device groups that it shares."""

    def staleness(self) -> dict[int, int]:
        """Return lag -> number of trained samples."""
        total: Counter[int] = Counter()
        for row in self.lags:
            total[row.in_flight + row.in_queue] += row.num_samples
        return dict(sorted(total.items()))


class SimulationRecorder:
    """Records what happens during a simulated run."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.step_ends: list[float] = []
        self.num_steps: int | None = None
        """Steps of the run; None: those that are complete."""
        self.interruptions = 0
        self.seconds_kept = 0.0
        self._intervals: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
        self._versions: dict[int, tuple[int, int]] = {}
        self._lags: Counter[tuple[int, int]] = Counter()
        self._refused: Counter[str] = Counter()

    def add_generation(self, replicas: tuple[str, ...], start: float, end: float) -> None:
        """Record that these engines generated a sample without interruption."""
        self._intervals[replicas].append((start, end))

    def add_interruption(self, seconds: float) -> None:
        """Record that a sample was interrupted after this many seconds of generation."""
        self.interruptions += 1
        self.seconds_kept += seconds

    def add_sample(self, sample: int, oldest: int, newest: int) -> None:
        """Record that a sample of the trained stream is finished."""
        self._versions[sample] = (oldest, newest)

    def add_batch(self, instruction: FormBatch) -> None:
        """Record a batch of the trained stream."""
        for sample in instruction.samples:
            oldest, newest = self._versions.pop(sample)
            if oldest >= 0:
                self._lags[newest - oldest, instruction.step - newest] += 1

    def add_refused(self, instruction: Refuse) -> None:
        """Record that samples of the trained stream left the run."""
        self._refused[instruction.reason.value] += len(instruction.samples)
        for sample in instruction.samples:
            self._versions.pop(sample, None)

    def timeline(self, finish: Finish) -> Timeline:
        """Return the times alone."""
        num_steps = len(self.step_ends) if self.num_steps is None else self.num_steps
        return Timeline(tuple(self.spans), tuple(self.step_ends), finish, num_steps)

    def result(
        self,
        finish: Finish,
        lanes: Sequence[str],
        groups_of: Mapping[str, Sequence[str]],
        samples_per_step: int,
    ) -> SimulatedRun:
        """Return all results.

        Args:
            lanes: the device groups. Engines with their own devices are added to them.
            groups_of: engine -> the device groups that it shares with batch nodes, or none.
        """
        timeline = self.timeline(finish)
        window = timeline.window()
        seconds = window[1] - window[0]
        generating = tuple(self._generating(groups_of))
        busy: dict[str, list[tuple[float, float]]] = {lane: [] for lane in lanes}
        for span in self.spans:
            if span.lane in busy:
                busy[span.lane].append((span.start, span.end))
        for span in generating:
            busy.setdefault(span.lane, []).append((span.start, span.end))
        all_intervals = (interval for part in self._intervals.values() for interval in part)
        seconds_generating = sum(_length(interval, window) for interval in all_intervals)
        return SimulatedRun(
            timeline=timeline,
            samples_per_second=samples_per_step / timeline.period(),
            idle=tuple(
                (lane, max(0.0, 1 - _covered(spans, window) / seconds)) for lane, spans in busy.items()
            ),
            mean_generating=seconds_generating / seconds,
            lags=tuple(LagRow(*lag, num) for lag, num in sorted(self._lags.items())),
            interruptions=self.interruptions,
            seconds_kept=self.seconds_kept,
            refused=tuple(sorted(self._refused.items())),
            generating=generating,
        )

    def _generating(self, groups_of: Mapping[str, Sequence[str]]) -> Iterator[Span]:
        """Yield the times in which each engine generated. Intervals that touch are merged."""
        by_engine: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for replicas, intervals in self._intervals.items():
            for replica in replicas:
                by_engine[replica].extend(intervals)
        for replica, intervals in by_engine.items():
            for start, end in _merged(intervals):
                for lane in groups_of.get(replica) or (replica,):
                    yield Span(replica, lane, start, end, {})


def _length(interval: tuple[float, float], window: tuple[float, float]) -> float:
    return max(0.0, min(interval[1], window[1]) - max(interval[0], window[0]))


def _covered(intervals: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    """Return the seconds of a window that intervals cover."""
    return sum(_length(interval, window) for interval in _merged(intervals))


def _merged(intervals: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the union of intervals, as intervals that do not touch."""
    first, last = math.inf, -math.inf
    for start, end in sorted(intervals):
        if start > last:
            if first < last:
                yield first, last
            first = start
        last = max(last, end)
    if first < last:
        yield first, last
