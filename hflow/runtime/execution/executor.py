"""The executor: performs the state machine's instructions with real workers.

It owns the clock, the tasks and the book of who holds what; every decision is `RunState`'s.
One loop takes events, one task a worker polls for them, and one task a batch node runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.errors import RunError
from hflow.planner.data.group_placement import GroupPlacer
from hflow.planner.ir import Plan
from hflow.runtime import events as ev
from hflow.runtime.execution.batch_runner import BatchRunner, StepBatch
from hflow.runtime.execution.checkpoint import Checkpoints
from hflow.runtime.execution.engine_control import EngineControl
from hflow.runtime.execution.node_execution import NodeExecution, WorkerMessages
from hflow.runtime.execution.rebalance import Rebalancer
from hflow.runtime.execution.row_cursor import RowCursor, Rows
from hflow.runtime.execution.step_metrics import Observer, StepMetrics
from hflow.runtime.execution.streaming_runner import StreamingRunner
from hflow.runtime.ledger import Ledger
from hflow.runtime.state.run_state import RunState
from hflow.workers.interface import (
    ComputeOrder,
    ComputeReady,
    Failed,
    GroupOrder,
    Report,
    SampleReady,
    WorkerEvent,
    Workers,
)

SAVE = "save."


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    reason: str
    steps: int
    """Completed steps."""


class Executor:
    """Runs one plan to its end on started workers."""

    def __init__(
        self,
        plan: Plan,
        workers: Workers,
        rows: Mapping[str, Rows],
        observer: Observer,
        checkpoints: Checkpoints,
        ledger: Ledger,
        seed: int,
    ) -> None:
        self._plan = plan
        self._workers = workers
        self._observer = observer
        self._checkpoints = checkpoints
        self._ledger = ledger
        self._state = RunState(plan.schedule)
        self._events: asyncio.Queue[tuple[ev.Event, ...]] = asyncio.Queue()
        self._streams = {stream.name: stream for stream in plan.schedule.streams}
        self._opened_by = {stream.source: stream.name for stream in plan.schedule.streams}
        self._nodes = {node.name: node for node in plan.schedule.nodes}
        self._cursors = {
            name: RowCursor(rows[name], endless=stream.batch is not None)
            for name, stream in self._streams.items()
        }
        self._placer = GroupPlacer(plan)
        self._states = {stream.stream.name: stream for stream in self._state.data.streams}
        rebalancer = Rebalancer(plan, workers, self._placer, self._states)
        self._summaries: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._scores = StepMetrics(*_num_devices(plan))
        firing = NodeExecution(plan, workers, observer, self._scores, ledger, seed)
        self._batches = BatchRunner(plan, workers, observer, self._scores, firing)
        self._arrivals = StreamingRunner(plan, workers, firing, self._batches.holdings, ledger)
        self._engines = EngineControl(plan, workers, observer, self._scores, ledger, self._placer, rebalancer)
        self._steps = 0
        self._reason: str | None = None
        """Why the run ended."""
        self._tasks: asyncio.TaskGroup

    # ------------------------------------------------------------------------------ loop
    async def run(self) -> Outcome:
        """Run until the state machine says Finish.

        Raises:
            RunError: a body, worker or policy failed; the message says which and why.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                pollers = [self._spawn(self._poll(w)) for w in range(self._plan.cluster.num_devices)]
                self._feed(ev.Started())
                await self._loop()
                for poller in pollers:
                    poller.cancel()
        except* Exception as group:  # noqa: BLE001 - unwrapped and raised again below
            raise _first(group) from None
        assert self._reason is not None
        return Outcome(self._reason, self._steps)

    def stop(self) -> None:
        """Ask the run to end cleanly: what runs finishes, nothing new starts."""
        self._feed(ev.StopRequested())

    async def _loop(self) -> None:
        while self._reason is None:
            drained = list(await self._events.get())
            while not self._events.empty():
                drained += self._events.get_nowait()
            orders = WorkerMessages()
            for event in drained:
                for instruction in self._state.handle(event):
                    self._ledger.decided(instruction)
                    self._perform(instruction, orders)
            self._send(orders)

    def _feed(self, *events: ev.Event) -> None:
        self._events.put_nowait(events)

    async def _await(self, work: Awaitable[Sequence[ev.Event]]) -> None:
        self._feed(*await work)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    def _send(self, orders: WorkerMessages) -> None:
        for worker, groups in orders.groups.items():
            self._spawn(self._workers.open_groups(worker, groups))
        for worker, computes in orders.computes.items():
            self._spawn(self._workers.compute(worker, computes))

    # ---------------------------------------------------------------- worker -> controller
    async def _poll(self, worker: int) -> None:
        while True:
            report: Report = await self._workers.poll(worker)
            self._scores.reported(report)
            for span in report.spans:
                self._observer.on_span(worker, span)
            self._feed(*(self._translate(worker, event) for event in report.events))
            if glance := self._scores.glance(self._state.counts):
                self._observer.on_rollout(glance)

    def _translate(self, worker: int, event: WorkerEvent) -> ev.Event:
        match event:
            case SampleReady():
                self._ledger.reported(event)
                if event.sample not in self._states[event.stream].abandoned:
                    self._batches.holdings[event.stream].add_sample(event.sample, worker, event.length)
                    self._scores.arrived(event, is_trained=self._is_trained(event.stream))
                self._left_source(event.stream, event.sample)
                return ev.SampleDone(event.stream, event.sample, event.oldest)
            case ComputeReady():
                self._ledger.reported(event)
                return ev.NodeDone(event.node, event.key, event.keep)
            case Failed():
                if stream := self._opened_by.get(event.node):
                    self._left_source(stream, event.key)
                return ev.NodeFailed(event.node, event.key, ev.Refusal(event.reason), event.message)

    def _is_trained(self, stream: str) -> bool:
        return self._streams[stream].batch is not None

    def _left_source(self, stream: str, sample: int) -> None:
        self._placer.finished(stream, sample // self._streams[stream].group_size)

    # ---------------------------------------------------------------- controller -> worker
    def _perform(self, instruction: ev.Instruction, orders: WorkerMessages) -> None:
        match instruction:
            case ev.OpenGroup():
                self._open(instruction, orders)
            case ev.RunSample(node, sample):
                self._order_compute(orders, node, sample, (sample,))
            case ev.RunGroup(node, group, samples):
                self._order_compute(orders, node, group, samples)
            case ev.RunStreamingInference():
                self._spawn(self._await(self._arrivals.run(instruction)))
            case ev.Refuse():
                self._refuse(instruction)
            case ev.FormBatch():
                self._form(instruction)
            case ev.RunBatch(node, step):
                self._spawn(self._save(node, step) if node.startswith(SAVE) else self._fire(node, step))
            case ev.Publish(replica, version):
                self._spawn(self._await(self._engines.publish(replica, version)))
            case ev.Wake(replica, version):
                self._spawn(self._await(self._engines.wake(replica, version)))
            case ev.Sleep(replica):
                self._spawn(self._await(self._engines.sleep(replica)))
            case ev.StepDone(step):
                self._spawn(self._close_step(step))
            case ev.Finish(reason, error):
                if error:
                    raise RunError(reason)
                self._reason = reason

    def _open(self, what: ev.OpenGroup, orders: WorkerMessages) -> None:
        row = self._cursors[what.stream].row(what.group)
        if row is None:
            self._feed(ev.Exhausted(what.stream, what.group))
            return
        worker = self._placer.place(what.stream, what.group, len(what.samples))
        self._ledger.issued(what, row, worker, self._state.data.engine_version(what.stream))
        orders.groups[worker].append(GroupOrder(what.stream, what.group, row, what.samples))

    def _order_compute(self, orders: WorkerMessages, node: str, key: int, samples: tuple[int, ...]) -> None:
        stream = self._streams[self._nodes[node].stream]
        worker = self._placer.home(stream.name, samples[0] // stream.group_size)
        orders.computes[worker].append(ComputeOrder(node, key, samples))

    def _refuse(self, what: ev.Refuse) -> None:
        self._scores.refused(what.reason, len(what.samples))
        if self._is_trained(what.stream):
            self._scores.ages.forget(what.samples)
        self._observer.on_refusal(what.node, what.reason, what.message)
        home = self._placer.home(what.stream, what.group)
        self._placer.refused(what.stream, what.group, len(what.samples))
        self._spawn(self._free(home, what.stream, what.samples))

    async def _free(self, home: int, stream: str, samples: tuple[int, ...]) -> None:
        """Free all that there is of refused samples: at home, and where models read them."""
        await self._arrivals.until_free(stream, samples)
        holdings = self._batches.holdings[stream]
        held = {**holdings.workers_of(samples), home: samples}
        holdings.forget(samples)
        await asyncio.gather(
            *(self._workers.release(worker, there, stream, None) for worker, there in held.items())
        )

    # ----------------------------------------------------------------------------- batches
    def _form(self, what: ev.FormBatch) -> None:
        stream = self._streams[what.stream]
        is_evaluation = not self._is_trained(what.stream)
        if is_evaluation:
            self._cursors[what.stream].restart()
        else:
            self._scores.add(what.step, self._scores.ages.bind(what.samples, what.step))
        self._placer.bound(what.stream, what.groups)
        batch = StepBatch(what.stream, what.step, what.samples, what.groups, stream.group_size)
        self._batches.form(batch)
        summary = self._spawn(self._batches.summarize(batch, is_evaluation))
        self._summaries[what.stream, what.step] = summary

    async def _fire(self, node: str, step: int) -> None:
        await self._batches.fire(node, step)
        self._feed(ev.NodeDone(node, step))
        await self._batches.free_read(node, step)

    async def _close_step(self, step: int) -> None:
        """Log a complete step and free its samples."""
        for key in [key for key in self._summaries if key[1] == step]:
            await self._summaries.pop(key)
        await self._batches.close_step(step)
        if step < self._plan.schedule.num_steps:
            self._steps = step + 1
            self._observer.on_step(step, self._scores.close(step, self._state.counts()))

    # ------------------------------------------------------------------------------ saving
    async def _save(self, node: str, step: int) -> None:
        model = node.removeprefix(SAVE)
        await self.save(model, step + 1)
        self._feed(ev.NodeDone(node, step))

    async def save(self, model: str, steps: int) -> None:
        """Save a model as of `steps` completed steps."""
        await self._workers.save(model, str(self._checkpoints.begin(steps, model)))
        self._checkpoints.done(steps, model)


def _num_devices(plan: Plan) -> tuple[int, int]:
    """Engines, and workers that train or infer."""
    engines = sum(replica.layout.data for replica in plan.replicas if replica.role == "gen")
    return engines, len({worker for r in plan.replicas if r.role != "gen" for worker in r.workers})


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real exception of a group of groups."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
