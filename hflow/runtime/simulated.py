"""What a simulated run did: times, staleness, idle devices. Frozen rows, and the books they come from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hflow.runtime.events import Finish, FormBatch, Refuse
from hflow.workers.base import Span


@dataclass(frozen=True)
class Timeline:
    """When things happened, in seconds from the run's start."""

    spans: tuple[Span, ...]
    """Batch nodes, on the lane of their device group, and engines' waking times, on their own."""
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
    """Device group or engine -> share of the steady state in which nothing runs on it."""
    mean_generating: float
    """Samples that generate at once in the steady state, on average."""
    lags: tuple[LagRow, ...]
    """Sorted; empty for streams without versions."""
    interruptions: int
    """How often a sample that generated gave way to new weights or to training."""
    refused: tuple[tuple[str, int], ...]
    """Reason -> samples that were refused or dropped."""

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
        self._stretches: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
        self._versions: dict[int, tuple[int, int]] = {}
        self._lags: Counter[tuple[int, int]] = Counter()
        self._refused: Counter[str] = Counter()
        self._num_trained = 0

    def generated(self, replicas: tuple[str, ...], start: float, end: float) -> None:
        """A sample generated on these engines without a break."""
        self._stretches[replicas].append((start, end))

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

    def close(self, finish: Finish, lanes: Sequence[str], samples_a_step: int) -> SimulatedRun:
        """Everything; `lanes` are the device groups, beside which engines are listed."""
        timeline = self.timeline(finish)
        window = timeline.window()
        seconds = window[1] - window[0]
        busy: dict[str, list[tuple[float, float]]] = {lane: [] for lane in lanes}
        for replicas, stretches in self._stretches.items():
            for replica in replicas:
                busy.setdefault(replica, []).extend(stretches)
        for span in self.spans:
            if span.lane in lanes:
                busy[span.lane].append((span.start, span.end))
        generating = sum(_length(stretch, window) for part in self._stretches.values() for stretch in part)
        return SimulatedRun(
            timeline=timeline,
            samples_per_second=samples_a_step / timeline.period(),
            idle=tuple(
                (lane, max(0.0, 1 - _covered(spans, window) / seconds)) for lane, spans in busy.items()
            ),
            mean_generating=generating / seconds,
            lags=tuple(LagRow(*lag, num) for lag, num in sorted(self._lags.items())),
            interruptions=self.interruptions,
            refused=tuple(sorted(self._refused.items())),
        )


def _middle(step_ends: Sequence[float]) -> tuple[int, int]:
    num_steps = len(step_ends)
    if num_steps < 4:
        raise ValueError(f"a period needs at least four steps, and {num_steps} were simulated")
    return num_steps // 4, 3 * num_steps // 4


def _length(stretch: tuple[float, float], window: tuple[float, float]) -> float:
    return max(0.0, min(stretch[1], window[1]) - max(stretch[0], window[0]))


def _covered(stretches: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    """Seconds of a window in which something runs."""
    total, reached = 0.0, window[0]
    for start, end in sorted(stretches):
        total += max(0.0, min(end, window[1]) - max(start, reached))
        reached = max(reached, min(end, window[1]))
    return total
