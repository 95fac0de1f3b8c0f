"""The run on a virtual clock: the same `RunState`, with given durations in the place of workers."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from hflow.planner.ir import PUBLISH_PREFIX, Schedule
from hflow.planner.schedule import streaming_groups
from hflow.planner.workload import Workload, quantile
from hflow.runtime.events import (
    Asleep,
    Awake,
    Event,
    Exhausted,
    Finish,
    FormBatch,
    Instruction,
    NodeDone,
    OpenGroup,
    Publish,
    Published,
    Refuse,
    RunBatch,
    RunGroup,
    RunSample,
    RunStreamingInference,
    SampleDone,
    Sleep,
    Started,
    StepDone,
    Wake,
)
from hflow.runtime.simulation.simulation_result import Books, SimulatedRun, Timeline
from hflow.runtime.state.run_state import RunState
from hflow.workers.interface import Span

# -------------------- Seconds of what is simulated: a fixed number, or drawn for each sample from a
# distribution of lengths.


Draw = Callable[[int], float]
"""Sample, group or step -> seconds. The same for the same key, so that a run is decided by its seed."""
Durations = Mapping[str, float | Draw]


def seconds_of(durations: Durations, name: str, key: int) -> float:
    """Seconds of a node or source for one sample, group or step; 0 where it is not named."""
    given = durations.get(name, 0.0)
    return given(key) if callable(given) else given


def response_seconds(workload: Workload, seconds_per_token: float, seed: int) -> Draw:
    """Seconds of generating one response whose length follows the workload's distribution."""

    def draw(sample: int) -> float:
        share = Random(f"response/{seed}/{sample}").random()
        return quantile(workload, min(max(share, 1e-9), 1 - 1e-9)) * seconds_per_token

    return draw


@dataclass(eq=False)
class _Generating:
    """A sample in flight; `due` is None while it waits for a slot, or its engines sleep."""

    sample: int
    left: float
    oldest: int = -1
    """Version of the weights that it began with; -1: it has no token yet, or no engine makes it."""
    due: float | None = None
    since: float = 0.0
    """When it began, or went on after an interruption."""
    done: float = 0.0
    """Seconds of generation that it has behind it."""


@dataclass
class _Source:
    """A stream's samples in flight, and where its dataset stands."""

    flying: dict[int, _Generating] = field(default_factory=dict)
    waiting: dict[int, _Generating] = field(default_factory=dict)
    """Those in flight that do not generate, in the order in which they will: interrupted ones first."""
    first: int = 0
    """The group that holds the dataset's first row in this pass."""
    next: int = 0


def simulate(schedule: Schedule, durations: Durations, rows: Mapping[str, int] | None = None) -> Timeline:
    """Run a schedule on a virtual clock; see `simulate_run`."""
    simulation = _Simulation(schedule, durations, rows or {}, {})
    return simulation.books.timeline(simulation.run())


def simulate_run(
    schedule: Schedule,
    durations: Durations,
    rows: Mapping[str, int] | None = None,
    slots: Mapping[str, int] | None = None,
) -> SimulatedRun:
    """Run a schedule on a virtual clock, and account for its devices and samples.

    Args:
        schedule: what is run.
        durations: seconds of a node for each sample, group or step (where a model runs on what arrives, those
            of what runs together are summed); of a source for one sample (samples do not slow each other
            down); of a replica, to take new weights, and of `publish.REPLICA` where they are published. What
            is not named takes no time.
        rows: groups in each side stream's dataset; 1 where not named. The trained one has no end.
        slots: samples of a stream that generate at once; others in flight wait. As many as are in flight
            where not named.

    Raises:
        ValueError: fewer than four steps.
    """
    simulation = _Simulation(schedule, durations, rows or {}, slots or {})
    stream = schedule.streams[0]
    lanes = tuple(dict.fromkeys((*(group for group, _ in schedule.orders), *streaming_groups(schedule))))
    homes = {replica: group for group, names in schedule.shared for replica in names}
    samples_a_step = (stream.batch or 0) * stream.group_size
    return simulation.books.close(simulation.run(), lanes, homes, samples_a_step)


class _Simulation:
    """A virtual clock, a heap of what is due, and the engines' versions."""

    def __init__(
        self, schedule: Schedule, durations: Durations, rows: Mapping[str, int], slots: Mapping[str, int]
    ) -> None:
        self._state = RunState(schedule)
        self._durations = durations
        self._rows = rows
        self._slots = slots
        self._streams = {stream.name: stream for stream in schedule.streams}
        self._sources = {stream.name: _Source() for stream in schedule.streams}
        self._lanes = {n.name: n.group or n.name for n in schedule.nodes}
        self._publishers = dict(schedule.publishers)
        self._free_from: dict[str, float] = {}
        """Device group -> when it has done all that it was asked: it keeps the order."""
        self._versions: dict[str, int] = {}
        self._awake_since: dict[str, float] = {}
        self._heap: list[tuple[float, int, Event | _Generating, str]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._trained = schedule.streams[0].name
        self.books = Books()

    def run(self) -> Finish:
        """Handle what is due, in order of time, until the end."""
        finish = self._handle(Started())
        while finish is None:
            assert self._heap, "nothing is due, and the run has not ended"
            self._now, _, due, stream = heapq.heappop(self._heap)
            if not isinstance(due, _Generating):
                finish = self._handle(due)
            elif due.due == self._now:
                finish = self._handle(self._end_sample(stream, due))
        for replica in tuple(self._awake_since):
            self._close_span(replica)
        return finish

    def _handle(self, event: Event) -> Finish | None:
        if isinstance(event, Awake):
            self._versions[event.replica] = event.version
            self._awake_since[event.replica] = self._now
            for stream in self._sources:
                self._fill(stream)
        for instruction in self._state.handle(event):
            if isinstance(instruction, Finish):
                return instruction
            self._perform(instruction)
        return None

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case OpenGroup():
                self._open(instruction)
            case Refuse():
                self._abort(instruction)
            case RunSample(node, key) | RunGroup(node, key):
                self._report(node, NodeDone(node, key), key)
            case RunStreamingInference(node, number, keys):
                self._run_arrivals(node, number, keys)
            case RunBatch(node, step):
                self._work(self._lanes[node], node, NodeDone(node, step), step)
            case Publish(replica, version):
                name = PUBLISH_PREFIX + replica
                self._work(self._publishers[replica], name, Published(replica, version), version)
            case Wake(replica, version):
                loads = version != self._versions.get(replica)
                self._report(replica if loads else "", Awake(replica, version))
            case Sleep(replica):
                self._close_span(replica)
                self._interrupt(replica)
                self._report("", Asleep(replica))
            case FormBatch(stream):
                self._sources[stream].first = self._sources[stream].next
                if stream == self._trained:
                    self.books.formed(instruction)
            case StepDone(step) if step < self._state.parts.progress.num_steps:
                self.books.step_ends.append(self._now)

    def _report(self, name: str, event: Event, key: int = 0) -> None:
        """Let an event come after the duration of what is named."""
        self._await(self._now + seconds_of(self._durations, name, key), event)

    def _work(self, lane: str, name: str, event: Event, key: int) -> None:
        """The same, behind all that its device group was asked before; `key` is the step or version."""
        start = max(self._now, self._free_from.get(lane, 0.0))
        end = self._free_from[lane] = start + seconds_of(self._durations, name, key)
        self._await(end, event)
        self.books.spans.append(Span(name, lane, start, end, {"step": key}))

    def _await(self, when: float, event: Event) -> None:
        heapq.heappush(self._heap, (when, next(self._order), event, ""))

    def _run_arrivals(self, node: str, number: int, keys: Sequence[int]) -> None:
        """All keys are done together, after the seconds of each."""
        end = self._now + sum(seconds_of(self._durations, node, key) for key in keys)
        for key in keys:
            heapq.heappush(self._heap, (end, next(self._order), NodeDone(node, key), ""))
        if end > self._now:
            self.books.spans.append(Span(node, self._lanes[node], self._now, end, {"number": number}))

    # ------------------------------------------------------------------ samples
    def _open(self, what: OpenGroup) -> None:
        stream, source = self._streams[what.stream], self._sources[what.stream]
        source.next = what.group + 1
        if stream.batch is None and what.group - source.first >= self._rows.get(stream.name, 1):
            self._report("", Exhausted(stream.name, what.group))
            return
        for sample in what.samples:
            generating = _Generating(sample, seconds_of(self._durations, stream.source, sample))
            source.flying[sample] = source.waiting[sample] = generating
        self._fill(stream.name)

    def _fill(self, stream: str) -> None:
        """Let waiting samples generate while there are slots and all engines are awake."""
        source, slots = self._sources[stream], self._slots.get(stream)
        if not all(replica in self._awake_since for replica in self._streams[stream].replicas):
            return
        while source.waiting and (slots is None or len(source.flying) - len(source.waiting) < slots):
            sample = source.waiting.pop(next(iter(source.waiting)))
            if sample.oldest < 0:
                sample.oldest = self._version(stream)
            sample.since, sample.due = self._now, self._now + sample.left
            heapq.heappush(self._heap, (sample.due, next(self._order), sample, stream))

    def _interrupt(self, replica: str) -> None:
        """Samples keep what they have; their engines go on with them when all are awake again."""
        for name, source in self._sources.items():
            if replica not in self._streams[name].replicas:
                continue
            stopped = {number: s for number, s in source.flying.items() if number not in source.waiting}
            for sample in stopped.values():
                self._stop(name, sample)
                if sample.left > 0:
                    self.books.interrupted(sample.done)
            source.waiting = {**stopped, **source.waiting}

    def _stop(self, stream: str, sample: _Generating) -> None:
        """A sample generates no more, for now or for good."""
        assert sample.due is not None, f"sample {sample.sample} of {stream} does not generate"
        self.books.generated(self._streams[stream].replicas, sample.since, self._now)
        sample.done += self._now - sample.since
        sample.left, sample.due = sample.due - self._now, None

    def _end_sample(self, stream: str, sample: _Generating) -> SampleDone:
        self._stop(stream, sample)
        del self._sources[stream].flying[sample.sample]
        self._fill(stream)
        if stream == self._trained:
            self.books.sampled(sample.sample, sample.oldest, self._version(stream))
        return SampleDone(stream, sample.sample, sample.oldest)

    def _abort(self, what: Refuse) -> None:
        """What left the run is not generated to its end; its report comes at once."""
        source = self._sources[what.stream]
        for number in what.samples:
            if (sample := source.flying.pop(number, None)) is not None:
                if source.waiting.pop(number, None) is None:
                    self._stop(what.stream, sample)
                self._report("", SampleDone(what.stream, number, sample.oldest))
        self._fill(what.stream)
        if what.stream == self._trained:
            self.books.refused(what)

    def _version(self, stream: str) -> int:
        """The version that a stream is generated with; -1 where no engine makes it."""
        return min((self._versions[replica] for replica in self._streams[stream].replicas), default=-1)

    def _close_span(self, replica: str) -> None:
        version = self._versions[replica]
        start = self._awake_since.pop(replica)
        self.books.spans.append(Span("generate", replica, start, self._now, {"version": version}))
