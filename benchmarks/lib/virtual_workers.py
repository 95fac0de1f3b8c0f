"""`VirtualWorkers`: workers that only wait, so that the real controller can be measured alone.

Every engine has slots. A sample takes one for its drawn seconds, gives it up when the engine sleeps, and
resumes with the remaining seconds. Bodies of samples, batch nodes and transfers of weights take their seconds
and do nothing. Events keep their own times even if the event loop handles them late: as in a real run, a slow
controller does not slow the devices down. Events wait for each other as in a worker's `Mailbox`.

Time is that of the event loop. On a `ControllerTime` loop only the controller's CPU seconds pass and waiting
takes no time, so that results do not depend on other load of the machine.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import pickle
import selectors
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hflow.base.durable_files import FileChecksum
from hflow.data_plane.redistribute import Moves
from hflow.planner.plan.rows import PUBLISH_PREFIX, Plan
from hflow.runtime.simulation.simulate import Durations, seconds_of
from hflow.types.engine import EngineStats, EpisodeState, SleepLevel
from hflow.workers.interface import (
    ComputeReady,
    ComputeTask,
    Failed,
    GroupTask,
    NodeResult,
    NodeTask,
    SampleReady,
    Span,
    WeightsLoaded,
    WorkerEvent,
    WorkerReport,
    Workers,
    WorkerSetup,
)
from hflow.workers.mailbox import LINGER_SECONDS, pause_seconds

TICK = 0.002
"""Seconds between two looks at what is due."""


@dataclass(eq=False, slots=True)
class _Sample:
    """A sample on an engine; `due` is None while it waits for a slot, or its engine sleeps."""

    stream: str
    number: int
    left: float
    due: float | None = None
    since: float = 0.0
    segments: list[tuple[int, float]] = field(default_factory=list)
    """Versions, and the seconds of drawing under each."""


@dataclass(eq=False)
class _Engine:
    """One data rank of a generation replica."""

    slots: int
    version: int = -1
    is_awake: bool = False
    running: dict[int, _Sample] = field(default_factory=dict)
    waiting: deque[_Sample] = field(default_factory=deque)
    busy_since: float = 0.0
    drawn: EngineStats = field(default_factory=EngineStats)
    num_ended: int = 0
    awake_since: float = 0.0


_NO_ENGINE = _Engine(0)


@dataclass(eq=False)
class _Box:
    """A worker's mailbox: what its next report takes along."""

    events: list[WorkerEvent] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    ready_at: float = 0.0
    reported_at: float = 0.0
    num_due: int = 0
    waiter: asyncio.Future[None] | None = None


@dataclass
class Traffic:
    """What crossed the border between controller and workers, and what the workers' part cost."""

    messages: int = 0
    """Calls from the controller, polls included."""
    events: int = 0
    sent_bytes: int = 0
    """Pickled arguments of all calls but polls."""
    received_bytes: int = 0
    """Pickled reports and results of nodes."""
    own_cpu: float = 0.0
    """CPU seconds spent here instead of in the controller."""
    slot_seconds: float = 0.0
    """Seconds of drawing, summed over slots."""


class _NoWait(selectors.DefaultSelector):
    """Does not wait, but notes how long it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.skipped += timeout or 0.0
        return super().select(0)


class ControllerTime(asyncio.SelectorEventLoop):
    """An event loop whose clock counts CPU seconds of the process and jumps over waits.

    Those of the virtual workers are left out. Threads count as if none ran beside the loop, as Python's lock
    has it for most of what they do.
    """

    def __init__(self) -> None:
        self._idle = _NoWait()
        self.traffic = Traffic()
        super().__init__(self._idle)

    def time(self) -> float:
        return time.process_time() - self.traffic.own_cpu + self._idle.skipped


class VirtualWorkers(Workers):
    """Workers of a plan with given durations.

    Args:
        plan: what runs.
        durations: as for `runtime.simulate.simulate_run`: seconds of nodes, of one sample of a source, of a
            replica to take new weights.
        slots: samples that one engine draws at once.
        seconds_per_token: of one sample, by which seconds become tokens.
        prompt: tokens of a prompt.
        traffic: is counted here.
        num_turns: completions of each sample.
    """

    def __init__(
        self,
        plan: Plan,
        durations: Durations,
        slots: int,
        seconds_per_token: float,
        prompt: int,
        traffic: Traffic,
        num_turns: int = 1,
    ) -> None:
        self.traffic = traffic
        self._plan = plan
        self._durations = durations
        self._pace = seconds_per_token
        self._pause = pause_seconds(plan.cluster.num_devices)
        self._prompt = prompt
        self._num_turns = num_turns
        self._sources = {stream.name: stream.source for stream in plan.schedule.streams}
        self._sizes = {stream.name: stream.group_size for stream in plan.schedule.streams}
        self._boxes = [_Box() for _ in range(plan.cluster.num_devices)]
        self._engines: dict[int, _Engine] = {}
        self._heads: dict[str, tuple[int, ...]] = {}
        for replica in plan.replicas:
            if replica.role == "gen":
                self._heads[replica.name] = replica.heads
                self._engines.update({worker: _Engine(slots) for worker in replica.heads})
        self._versions: dict[str, int] = {}
        self._heap: list[tuple[float, int, int, _Sample | WorkerEvent]] = []
        """When, order, worker, and what: a sample's last token, or an event of a body."""
        self._order = itertools.count()
        self._clock: asyncio.TimerHandle
        self._loop: asyncio.AbstractEventLoop

    async def start(self, setup: WorkerSetup) -> None:
        """Nothing is built; `begin` starts the clock."""

    def begin(self) -> None:
        """Start the clock, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.call_later(TICK, self._tick)

    async def open_groups(self, worker: int, tasks: Sequence[GroupTask]) -> None:
        """Samples wait for slots, in the order in which they come."""
        with self._called(tasks) as now:
            engine, box = self._engines[worker], self._boxes[worker]
            for task in tasks:
                source = self._sources[task.stream]
                box.num_due += len(task.samples)
                for number in task.samples:
                    seconds = seconds_of(self._durations, source, number)
                    moved: _Sample | None = task.journals[number] if task.journals else None
                    engine.waiting.append(moved or _Sample(task.stream, number, seconds))
            self._fill(worker, now)

    async def detach_groups(self, worker: int, stream: str, groups: Sequence[int]) -> list[GroupTask]:
        """Whole groups leave with what they have; on an engine that sleeps all wait."""
        with self._called((stream, groups)):
            engine, size = self._engines[worker], self._sizes[stream]
            held = {s.number: s for s in engine.waiting if s.stream == stream}
            tasks = []
            for group in groups:
                numbers = tuple(range(group * size, (group + 1) * size))
                if held.keys() >= set(numbers):
                    journals = {number: held[number] for number in numbers}
                    tasks.append(GroupTask(stream, group, 0, numbers, journals))
            gone = {id(sample) for task in tasks for sample in task.journals.values()}
            engine.waiting = deque(s for s in engine.waiting if id(s) not in gone)
            self._boxes[worker].num_due -= len(gone)
        return tasks

    async def compute(self, worker: int, tasks: Sequence[ComputeTask]) -> None:
        """Bodies take their seconds, all at once."""
        with self._called(tasks) as now:
            self._boxes[worker].num_due += len(tasks)
            for task in tasks:
                seconds = seconds_of(self._durations, task.node, task.key)
                self._push(now + seconds, worker, ComputeReady(task.node, task.key, value=0.0))

    async def poll(self, worker: int, num_lines: int = 0) -> WorkerReport:
        """Wait for events, and a little for others."""
        box = self._boxes[worker]
        if not self._is_ready(box, self._loop.time()):
            box.waiter = self._loop.create_future()
            await box.waiter
        self.traffic.messages += 1
        with self._own() as now:
            stats = self._take_drawn(worker, now)
            report = WorkerReport(
                worker,
                tuple(box.events),
                tuple(box.spans),
                engine_stats=stats,
                episodes=self._episodes(worker),
                peak_bytes=1 << 33,
            )
            self.traffic.events += len(box.events)
            self.traffic.received_bytes += _num_bytes(report)
            box.events, box.spans, box.waiter = [], [], None
            box.reported_at = now
        return report

    async def transfer(self, moves: Moves) -> int:
        """Its seconds are part of the node's."""
        with self._called(*moves.by_destination().values()):
            return 0

    async def run(self, tasks: Mapping[int, NodeTask]) -> list[NodeResult]:
        """A node takes its seconds on all its workers at once."""
        with self._called(*tasks.values()):
            first = next(iter(tasks.values()))
        start = self._loop.time()
        await asyncio.sleep(seconds_of(self._durations, first.node, first.step))
        span = Span(first.node, "device", start, self._loop.time(), {"step": first.step})
        with self._own():
            results = [
                NodeResult(task.node, task.step, task.samples, {"loss": 0.0}, span, worker)
                for worker, task in tasks.items()
            ]
            self.traffic.received_bytes += sum(map(_num_bytes, results))
        return results

    async def publish(self, replica: str, version: int) -> tuple[tuple[int, Span], ...]:
        """A copy of the weights takes its seconds."""
        self.traffic.messages += 1
        await asyncio.sleep(seconds_of(self._durations, f"{PUBLISH_PREFIX}{replica}", 0))
        return ()

    async def wake(self, replica: str, version: int) -> WeightsLoaded:
        """New weights take the replica's seconds; then its engines continue with what they had."""
        heads = self._heads[replica]
        self.traffic.messages += len(heads)
        seconds = seconds_of(self._durations, replica, 0) if self._versions.get(replica) != version else 0.0
        moment = self._loop.time() + seconds
        self._versions[replica] = version
        await asyncio.sleep(seconds)
        for worker in heads:
            with self._own():
                engine = self._engines[worker]
                engine.version, engine.is_awake, engine.awake_since = version, True, self._loop.time()
                self._fill(worker, moment)
            await asyncio.sleep(0)
        return WeightsLoaded()

    async def sleep(self, replica: str, level: SleepLevel) -> None:
        """What runs keeps what it has, and comes before what waits."""
        heads = self._heads[replica]
        self.traffic.messages += len(heads)
        now = self._loop.time()
        self._advance(now)
        for worker in heads:
            with self._own():
                self._stop_all(worker, now)
            await asyncio.sleep(0)

    async def release(
        self, worker: int, samples: Sequence[int], stream: str, fields: Sequence[str] | None
    ) -> None:
        """A sample that still runs or waits is stopped, and reported as failed."""
        with self._called((samples, stream, fields)) as now:
            engine = self._engines.get(worker)
            if fields is not None or engine is None:
                return
            for number in samples:
                self._cancel(worker, engine, number, now)
            self._fill(worker, now)

    async def summarize(
        self, worker: int, stream: str, samples: Sequence[int]
    ) -> dict[str, tuple[float, int]]:
        """One number."""
        with self._called((stream, samples)):
            return {f"{stream}/reward": (0.0, len(samples))}

    async def save(self, model: str, directory: str) -> None:
        """Nothing is written."""

    async def finish_save(self, model: str, directory: str) -> dict[str, FileChecksum]:
        """There are no files."""
        return {}

    async def close(self) -> None:
        """Stop the clock."""
        self._clock.cancel()

    # ----------------------------------------------------------------------------- time
    def _tick(self) -> None:
        with self._own() as now:
            self._advance(now)
            self._wake_pollers(now)
            self._clock = self._loop.call_at(now + TICK, self._tick)

    def _advance(self, now: float) -> None:
        """Let everything happen that is due, in its order."""
        while self._heap and self._heap[0][0] <= now:
            due, _, worker, what = heapq.heappop(self._heap)
            if isinstance(what, _Sample):
                if what.due == due:
                    self._finish(worker, what, due)
            else:
                self._put(worker, what, due)

    def _wake_pollers(self, now: float) -> None:
        for box in self._boxes:
            if box.waiter is not None and not box.waiter.done() and self._is_ready(box, now):
                box.waiter.set_result(None)

    def _is_ready(self, box: _Box, now: float) -> bool:
        return bool(box.events) and (now >= box.ready_at or box.num_due <= 0)

    def _push(self, due: float, worker: int, what: _Sample | WorkerEvent) -> None:
        heapq.heappush(self._heap, (due, next(self._order), worker, what))

    def _put(self, worker: int, event: WorkerEvent, now: float) -> None:
        box = self._boxes[worker]
        if not box.events:
            box.ready_at = max(now + LINGER_SECONDS, box.reported_at + self._pause)
        box.events.append(event)
        box.num_due -= 1

    # -------------------------------------------------------------------------- samples
    def _fill(self, worker: int, now: float) -> None:
        """Let waiting samples draw while there are slots."""
        engine = self._engines[worker]
        while engine.is_awake and engine.waiting and len(engine.running) < engine.slots:
            sample = engine.waiting.popleft()
            if not engine.running:
                engine.busy_since = now
            engine.running[sample.number] = sample
            sample.since, sample.due = now, now + sample.left
            self._push(sample.due, worker, sample)

    def _stop(self, engine: _Engine, sample: _Sample, now: float) -> None:
        """A sample draws no more, for now or for good."""
        assert sample.due is not None
        spent = now - sample.since
        sample.segments.append((engine.version, spent))
        sample.left, sample.due = sample.due - now, None
        self.traffic.slot_seconds += spent
        del engine.running[sample.number]
        if not engine.running:
            engine.drawn += EngineStats(seconds=now - engine.busy_since)

    def _finish(self, worker: int, sample: _Sample, now: float) -> None:
        engine = self._engines[worker]
        self._stop(engine, sample, now)
        engine.num_ended += 1
        runs = tuple(self._runs(sample))
        num_tokens = sum(tokens for _, tokens in runs)
        engine.drawn += EngineStats(num_tokens=num_tokens)
        oldest, newest = runs[0][0], runs[-1][0]
        length = self._prompt + num_tokens
        ready = SampleReady(
            sample.stream, sample.number, length, num_tokens, oldest, newest, runs, self._num_turns
        )
        self._put(worker, ready, now)
        self._fill(worker, now)

    def _runs(self, sample: _Sample) -> Iterator[tuple[int, int]]:
        """Whole tokens under each version; a sample has at least one."""
        seconds, told = 0.0, 0
        for number, (version, spent) in enumerate(sample.segments, start=1):
            seconds += spent
            tokens = round(seconds / self._pace) - told
            if tokens > 0 or (number == len(sample.segments) and not told):
                yield version, max(1, tokens)
                told += max(1, tokens)

    def _stop_all(self, worker: int, now: float) -> None:
        engine = self._engines[worker]
        stopped = list(engine.running.values())
        for sample in stopped:
            self._stop(engine, sample, now)
        kept = sum(round(sum(spent for _, spent in sample.segments) / self._pace) for sample in stopped)
        engine.drawn += EngineStats(num_interrupted=len(stopped), num_kept=kept)
        engine.waiting.extendleft(reversed(stopped))
        engine.is_awake = False
        note = {"version": engine.version}
        self._boxes[worker].spans.append(
            Span("generate", "generate", engine.awake_since, self._loop.time(), note)
        )

    def _cancel(self, worker: int, engine: _Engine, number: int, now: float) -> None:
        sample = engine.running.get(number)
        if sample is not None:
            self._stop(engine, sample, now)
        else:
            sample = next((held for held in engine.waiting if held.number == number), None)
            if sample is None:
                return
            engine.waiting.remove(sample)
        self._put(worker, Failed(self._sources[sample.stream], number, "failed", "released"), now)

    def _take_drawn(self, worker: int, now: float) -> EngineStats:
        engine = self._engines.get(worker)
        if engine is None:
            return EngineStats()
        drawn, engine.drawn = engine.drawn, EngineStats()
        if engine.running:
            drawn += EngineStats(seconds=now - engine.busy_since)
            engine.busy_since = now
        return drawn

    def _episodes(self, worker: int) -> dict[str, int]:
        engine = self._engines.get(worker, _NO_ENGINE)
        counts = {
            EpisodeState.PENDING: len(engine.waiting),
            EpisodeState.GENERATING: len(engine.running),
            EpisodeState.TERMINATED: engine.num_ended,
        }
        return {state.value: counts.get(state, 0) for state in EpisodeState}

    @contextmanager
    def _called(self, *messages: object) -> Iterator[float]:
        """Receive calls from the controller, one to each of several workers."""
        with self._own() as now:
            self.traffic.messages += len(messages)
            self.traffic.sent_bytes += sum(map(_num_bytes, messages))
            yield now

    @contextmanager
    def _own(self) -> Iterator[float]:
        """Work of the workers in the controller's thread: its CPU seconds are counted apart."""
        now, begin = self._loop.time(), time.thread_time()
        try:
            yield now
        finally:
            self.traffic.own_cpu += time.thread_time() - begin


def _num_bytes(message: object) -> int:
    """Return the bytes of a message, without what Ray adds to it."""
    return len(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
