"""`simulate_run` runs a schedule on a virtual clock, with given durations in the place of workers.

Invariant: every decision is made by the same `RunState` as in a real run. Only times are simulated.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from hflow.planner.plan.rows import PUBLISH_PREFIX, Schedule, ScheduledStream
from hflow.planner.plan.schedule import shared_groups, streaming_groups
from hflow.planner.plan.workload import Workload, quantile
from hflow.runtime.events import (
    Accept,
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
from hflow.runtime.simulation.simulation_result import (
    SimulatedRun,
    SimulationRecorder,
    Timeline,
    steady_steps,
)
from hflow.runtime.state.run_state import RunState
from hflow.workers.interface import Span

STOPPED = "the steps of the steady state are complete"
"""Reason for which a run ends of which no more is simulated."""

DurationFunction = Callable[[int], float]
"""Sample, group or step -> seconds. It must be deterministic, so that a seed determines the run."""
Durations = Mapping[str, float | DurationFunction]
"""Node, source, replica or `publish.REPLICA` -> seconds."""
Speeds = Mapping[str, Callable[[int], float]]
"""Stream -> how many times faster its samples are generated while a number of them run than while all slots
are used."""


def simulate(schedule: Schedule, durations: Durations, rows: Mapping[str, int] | None = None) -> Timeline:
    """Run a schedule on a virtual clock and return its times, with durations as in `simulate_run`.

    `rows` are the groups in each side stream's dataset; 1 if not named. The trained stream's is endless.
    """
    simulator = _Simulator(schedule, durations, rows or {}, {}, {})
    return simulator.recorder.timeline(simulator.run())


def simulate_run(
    schedule: Schedule,
    durations: Durations,
    slots: Mapping[str, int] | None = None,
    speeds: Speeds | None = None,
    *,
    steady_only: bool = False,
) -> SimulatedRun:
    """Run a schedule on a virtual clock, and report on its devices and samples.

    Args:
        durations: seconds of a node for each sample, group or step (for a model that runs on arriving
            samples, the seconds of samples that run together are added up); of a source for one sample
            while all slots are used; of a replica, to load new weights; and of
            `publish.REPLICA`, to publish them. What is not named takes no time.
        slots: samples of a stream that generate at once, while others in flight wait; unlimited if not named.
        speeds: speeds of streams; in others the samples that run do not change each other's pace.
        steady_only: whether to stop when the steps of the steady state are complete. The period and the idle
            shares are the same; lags, interruptions and refusals are those until then.

    Raises:
        ValueError: fewer than four steps.
    """
    simulator = _Simulator(schedule, durations, {}, slots or {}, speeds or {})
    stream = schedule.streams[0]
    groups = [group for group, _ in (*schedule.orders, *schedule.shared)]
    lanes = tuple(dict.fromkeys((*groups, *streaming_groups(schedule))))
    groups_of = {replica: shared_groups(schedule, replica) for replica in stream.replicas}
    samples_per_step = (stream.batch or 0) * stream.group_size
    finish = simulator.run(steady_steps(schedule.num_steps).stop if steady_only else None)
    return simulator.recorder.result(finish, lanes, groups_of, samples_per_step)


def seconds_of(durations: Durations, name: str, key: int) -> float:
    """Return the seconds of a node or source for one sample, group or step; 0 if it is not named."""
    duration = durations.get(name, 0.0)
    return duration(key) if callable(duration) else duration


def response_seconds(
    workload: Workload, seconds_per_token: float, seed: int, seconds_per_sample: float = 0.0
) -> DurationFunction:
    """Return the duration of responses whose lengths follow the workload's distribution."""
    length = _response_lengths(workload, seed)

    def seconds(sample: int) -> float:
        return length(sample) * seconds_per_token + seconds_per_sample

    return seconds


@lru_cache(maxsize=4)
def _response_lengths(workload: Workload, seed: int) -> Callable[[int], int]:
    """Return the tokens of each sample's response. A search simulates the same samples for many plans."""

    @lru_cache(maxsize=1 << 16)
    def length(sample: int) -> int:
        share = Random(f"response/{seed}/{sample}").random()
        return quantile(workload, min(max(share, 1e-9), 1 - 1e-9))

    return length


@dataclass(eq=False, slots=True)
class _SampleInFlight:
    """A sample that is generated, or waits to be."""

    sample: int
    source: _Source
    seconds: float
    """While all slots are used."""
    seconds_left: float
    """While all slots are used, since the speed last changed."""
    oldest: int = -1
    """Version of the weights that it began with; -1: it has no token yet, or no engine generates it."""
    due: float | None = None
    """When it will be finished; None while it waits for a slot, or while its engines sleep."""
    since: float = 0.0
    """When it began, or continued after an interruption."""


@dataclass(eq=False, slots=True)
class _Source:
    """The samples of a stream in flight, and the position in its dataset."""

    stream: ScheduledStream
    slots: float
    speed_of: Callable[[int], float] | None
    """Number of samples that run -> their speed; None: it is always the same."""
    is_awake: bool
    """Whether all engines are awake."""
    running: dict[int, _SampleInFlight] = field(default_factory=dict)
    waiting: dict[int, _SampleInFlight] = field(default_factory=dict)
    """The samples in flight that wait for generation, in order: interrupted samples first."""
    version: int = -1
    """The version of the weights that generate; -1 without an engine."""
    first_group: int = 0
    """The group that has the dataset's first row in this evaluation."""
    speed: float = 1.0
    """The speed of the samples that run."""


class _Simulator:
    """A virtual clock, a heap of what is due, and the engines' versions."""

    def __init__(
        self,
        schedule: Schedule,
        durations: Durations,
        rows: Mapping[str, int],
        slots: Mapping[str, int],
        speeds: Speeds,
    ) -> None:
        self._state = RunState(schedule)
        self._durations = durations
        self._rows = rows
        self._sources = {
            stream.name: _Source(
                stream,
                slots=slots.get(stream.name, math.inf),
                speed_of=speeds.get(stream.name),
                is_awake=not stream.replicas,
            )
            for stream in schedule.streams
        }
        self._lanes = {n.name: n.groups or (n.name,) for n in schedule.nodes}
        self._publishers = dict(schedule.publishers)
        self._free_from: dict[str, float] = {}
        """Device group -> when it is done with everything that it was asked to do, in that order."""
        self._versions: dict[str, int] = {}
        self._awake_since: dict[str, float] = {}
        self._heap: list[tuple[float, int, Event | _SampleInFlight]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._trained = schedule.streams[0].name
        self.recorder = SimulationRecorder()

    def run(self, num_steps: int | None = None) -> Finish:
        """Handle what is due, in order of time, until the run is over, or some of its steps are complete."""
        finish, ends = self._handle(Started()), self.recorder.step_ends
        while finish is None and len(ends) != num_steps:
            assert self._heap, "nothing is due, and the run has not ended"
            self._now, _, due = heapq.heappop(self._heap)
            if not isinstance(due, _SampleInFlight):
                finish = self._handle(due)
            elif due.due == self._now:
                finish = self._handle(self._finish_sample(due))
        for replica in tuple(self._awake_since):
            self._record_awake_time(replica)
        if finish is None:
            finish, self.recorder.num_steps = Finish(STOPPED), self._state.num_steps
            for source in self._sources.values():
                for sample in source.running.values():
                    self._stop(sample)
        return finish

    def _handle(self, event: Event) -> Finish | None:
        if isinstance(event, Awake):
            self._continue(event)
        for instruction in self._state.handle(event):
            if isinstance(instruction, Finish):
                return instruction
            self._perform(instruction)
        return None

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case RunSample(node, key) | RunGroup(node, key):
                self._send_after(node, NodeDone(node, key), key)
            case Accept():
                pass
            case OpenGroup():
                self._open_group(instruction)
            case Refuse():
                self._abort(instruction)
            case RunStreamingInference(node, number, keys):
                self._run_streaming(node, number, keys)
            case RunBatch(node, step):
                self._run_on_lanes(self._lanes[node], node, NodeDone(node, step), step)
            case Publish(replica, version):
                name = PUBLISH_PREFIX + replica
                self._run_on_lanes(self._publishers[replica], name, Published(replica, version), version)
            case Wake(replica, version):
                loads_weights = version != self._versions.get(replica)
                self._send_after(replica if loads_weights else "", Awake(replica, version))
            case Sleep(replica, _):
                self._record_awake_time(replica)
                self._interrupt(replica)
                self._send_after("", Asleep(replica))
            case FormBatch(stream):
                self._sources[stream].first_group += self._rows.get(stream, 1)
                if stream == self._trained:
                    self.recorder.add_batch(instruction)
            case StepDone(step) if step < self._state.num_steps:
                self.recorder.step_ends.append(self._now)

    def _send_after(self, name: str, event: Event, key: int = 0) -> None:
        """Send an event after the duration of a node, source or replica."""
        self._schedule(self._now + seconds_of(self._durations, name, key), event)

    def _run_on_lanes(self, lanes: Sequence[str], name: str, event: Event, key: int) -> None:
        """Send an event after the duration of `name`, which begins when all device groups are free."""
        start = max(self._now, *(self._free_from.get(lane, 0.0) for lane in lanes))
        end = start + seconds_of(self._durations, name, key)
        self._free_from |= dict.fromkeys(lanes, end)
        self._schedule(end, event)
        args = {"version": key} if name.startswith(PUBLISH_PREFIX) else {"step": key + 1}
        self.recorder.spans += [Span(name, lane, start, end, args) for lane in lanes]

    def _schedule(self, time: float, event: Event) -> None:
        heapq.heappush(self._heap, (time, next(self._order), event))

    def _run_streaming(self, node: str, number: int, keys: Sequence[int]) -> None:
        """Finish all keys at once, after the sum of their durations."""
        end = self._now + sum(seconds_of(self._durations, node, key) for key in keys)
        for key in keys:
            self._schedule(end, NodeDone(node, key))
        if end > self._now:
            self.recorder.spans += [
                Span(node, lane, self._now, end, {"number": number}) for lane in self._lanes[node]
            ]

    # Samples
    def _open_group(self, instruction: OpenGroup) -> None:
        source = self._sources[instruction.stream]
        stream, row = source.stream, instruction.group - source.first_group
        if stream.batch is None and row >= self._rows.get(stream.name, 1):
            self._send_after("", Exhausted(stream.name, instruction.group))
            return
        for number in instruction.samples:
            seconds = seconds_of(self._durations, stream.source, number)
            source.waiting[number] = _SampleInFlight(number, source, seconds, seconds)
        self._fill_slots(source)

    def _fill_slots(self, source: _Source) -> None:
        """Let waiting samples generate while there are slots and all engines are awake."""
        if not source.is_awake:
            return
        while source.waiting and len(source.running) < source.slots:
            number = next(iter(source.waiting))
            sample = source.running[number] = source.waiting.pop(number)
            if sample.oldest < 0:
                sample.oldest = source.version
            sample.since = self._now
            heapq.heappush(self._heap, self._due(sample))
        self._update_speed(source)

    def _due(self, sample: _SampleInFlight) -> tuple[float, int, _SampleInFlight]:
        """Return the time at which a sample that runs will be finished, as an entry of the heap."""
        sample.due = due = self._now + sample.seconds_left / sample.source.speed
        return due, next(self._order), sample

    def _update_speed(self, source: _Source) -> None:
        """Give the samples that run the speed of their number."""
        if source.speed_of is None or not source.running:
            return
        speed = source.speed_of(len(source.running))
        if speed == source.speed:
            return
        for sample in source.running.values():
            self._count_progress(sample)
        source.speed = speed
        # Most of the heap is these samples: it is faster to make it again than to add all of them.
        others = [row for row in self._heap if getattr(row[2], "source", None) is not source]
        self._heap = others + [self._due(sample) for sample in source.running.values()]
        heapq.heapify(self._heap)

    def _count_progress(self, sample: _SampleInFlight) -> None:
        """Take what has been generated at the current speed off the seconds that are left."""
        assert sample.due is not None
        sample.seconds_left = (sample.due - self._now) * sample.source.speed

    def _continue(self, event: Awake) -> None:
        """Let samples generate whose engines are all awake now."""
        self._versions[event.replica] = event.version
        self._awake_since[event.replica] = self._now
        for source in self._sources.values():
            replicas = source.stream.replicas
            if event.replica in replicas and self._awake_since.keys() >= set(replicas):
                source.is_awake = True
                source.version = min(self._versions[replica] for replica in replicas)
                self._fill_slots(source)

    def _interrupt(self, replica: str) -> None:
        """Interrupt the samples of an engine. They continue when all engines of their stream are awake."""
        for source in self._sources.values():
            if replica not in source.stream.replicas:
                continue
            source.is_awake = False
            for sample in source.running.values():
                self._stop(sample)
                if sample.seconds_left > 0:
                    self.recorder.add_interruption(sample.seconds - sample.seconds_left)
            source.waiting = {**source.running, **source.waiting}
            source.running = {}

    def _stop(self, sample: _SampleInFlight) -> None:
        """Stop generating a sample, for now or for good."""
        self.recorder.add_generation(sample.source.stream.replicas, sample.since, self._now)
        self._count_progress(sample)
        sample.due = None

    def _finish_sample(self, sample: _SampleInFlight) -> SampleDone:
        source = sample.source
        stream = source.stream.name
        self._stop(sample)
        del source.running[sample.sample]
        self._fill_slots(source)
        if stream == self._trained:
            self.recorder.add_sample(sample.sample, sample.oldest, source.version)
        return SampleDone(stream, sample.sample, sample.oldest)

    def _abort(self, instruction: Refuse) -> None:
        """Stop the refused samples that are in flight, and let each report at once."""
        source = self._sources[instruction.stream]
        for number in instruction.samples:
            if (sample := source.running.pop(number, None)) is not None:
                self._stop(sample)
            else:
                sample = source.waiting.pop(number, None)
            if sample is not None:
                self._send_after("", SampleDone(instruction.stream, number, sample.oldest))
        self._fill_slots(source)
        if instruction.stream == self._trained:
            self.recorder.add_refused(instruction)

    def _record_awake_time(self, replica: str) -> None:
        version = self._versions[replica]
        start = self._awake_since.pop(replica)
        self.recorder.spans.append(Span("generate", replica, start, self._now, {"version": version}))
