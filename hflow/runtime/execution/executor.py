"""`Executor` performs the state machine's instructions with real workers.

`RunState` makes every decision; the executor owns the event loop and the tasks. One loop handles events,
one task per worker polls for reports, and one task runs each batch node.

Invariant: every instruction leads to exactly the events that `events.py` names, and events are handled one
at a time in the order in which they arrive.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hflow.base.errors import RunError, WorkerFailureError
from hflow.planner.plan.rows import SAVE_PREFIX
from hflow.runtime import events as ev
from hflow.runtime.execution.batch_runner import BatchRunner, SampleRelease
from hflow.runtime.execution.engine_control import EngineControl, Rebalancer
from hflow.runtime.execution.engine_recovery import EngineRecovery
from hflow.runtime.execution.node_execution import NodeExecution, StepBatch, streamed_outputs
from hflow.runtime.execution.row_cursor import DatasetRows, RowCursor, SampledCursor, SampledRows
from hflow.runtime.execution.run_context import RunContext
from hflow.runtime.execution.streaming_runner import StreamingRunner
from hflow.runtime.records.activity import DEVICE, OngoingWork
from hflow.runtime.saving.run_saving import RunSaving
from hflow.runtime.saving.saved_run import ResumePoint
from hflow.runtime.state.run_state import RunState
from hflow.runtime.state.snapshot import RunSnapshot
from hflow.types.body_line import BodyLine
from hflow.workers.interface import (
    ComputeReady,
    ComputeTask,
    Failed,
    GroupTask,
    SampleReady,
    WorkerEvent,
    WorkerReport,
)

ROUND_EVENTS = 8192
"""Events after which a round ends, so that the event loop does other work too."""
LAST_LINES_SECONDS = 5.0
"""Longest wait for what bodies have printed, when a run ends."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    reason: str
    steps: int
    """Completed steps."""


class WorkerMessages:
    """What one round of instructions asks of each worker."""

    def __init__(self) -> None:
        self.groups: dict[int, list[GroupTask]] = defaultdict(list)
        self.computes: dict[int, list[ComputeTask]] = defaultdict(list)


class Executor:
    """Runs one plan to its end on started workers.

    Args:
        rows: stream -> the order of its dataset's rows.
        point: the checkpoint that the run continues from; None: it begins.
        save_seconds: time between two checkpoints besides those of the plan; None: there are no others.
        num_texts: samples of each batch whose text the observer receives.
        max_replacements: how many workers are replaced between two checkpoints, while the run continues.
    """

    def __init__(
        self,
        run: RunContext,
        rows: Mapping[str, DatasetRows],
        point: ResumePoint | None = None,
        save_seconds: float | None = None,
        num_texts: int = 0,
        max_replacements: int = 0,
    ) -> None:
        self._run = run
        plan = run.plan
        if point is not None:
            num_rows = {stream: order.num_rows for stream, order in rows.items()}
            saved = point.saved.with_rows(num_rows).with_outputs(streamed_outputs(plan))
            point = replace(point, saved=saved)
        self._point = point
        self._save_seconds = save_seconds
        snapshot = point.saved.snapshot if point else None
        self._state = RunState(plan.schedule, snapshot)
        self._events: asyncio.Queue[tuple[int | None, Sequence[Any]]] = asyncio.Queue()
        """Events of the run (worker None), and what workers report, in the order of arrival."""
        self._streams = {stream.name: stream for stream in plan.schedule.streams}
        self._num_wanted = {
            name: stream.group_size * (rows[name].num_rows if stream.batch is None else stream.batch)
            for name, stream in self._streams.items()
        }
        """Stream -> samples of a batch, or of an evaluation."""
        self._stream_of_source = {stream.source: stream.name for stream in plan.schedule.streams}
        self._nodes = {node.name: node for node in plan.schedule.nodes}
        evaluations = dict(snapshot.evaluations) if snapshot else {}
        self._samplers = {
            name: SampledCursor(sampled, stream.group_size, point.saved.samplers.get(name) if point else None)
            for name, stream in self._streams.items()
            if isinstance(sampled := rows[name], SampledRows)
        }
        self._cursors = self._samplers | {
            name: RowCursor(
                rows[name],
                endless=stream.batch is not None,
                first_group=evaluations[name].first_group if name in evaluations else 0,
            )
            for name, stream in self._streams.items()
            if name not in self._samplers
        }
        self._summaries: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._reports: set[asyncio.Task[None]] = set()
        """Tasks that report metrics of what is complete, and have not ended."""
        node_states = point.saved.node_states if point else {}
        num_steps_done = snapshot.steps if snapshot else 0
        node_execution = NodeExecution(run, node_states)
        self._release = SampleRelease(run.workers)
        self._batches = BatchRunner(run, node_execution, self._release, num_texts, num_steps_done)
        self._streaming = StreamingRunner(run, node_execution, self._batches.locations)
        self._engines = EngineControl(run, Rebalancer(run, self._state))
        self._saving = RunSaving(run, node_execution, self._release)
        self._recovery = EngineRecovery(
            run, self._state, self._batches.locations, self._enqueue, max_replacements
        )
        self._computing: dict[tuple[str, int], tuple[int, ComputeTask]] = {}
        """Node and key -> its worker and task, while the body runs or waits."""
        self._refused_in_evaluation: dict[str, int] = {}
        """Side stream -> samples that its present evaluation has refused; missing: none was ever refused."""
        self._num_steps_done = num_steps_done
        self._num_lines: Counter[int] = Counter()
        """Worker -> lines of bodies that its process has reported."""
        self._last_close: asyncio.Task[None] | None = None
        """Reports the step before, if it has begun."""
        self._reason: str | None = None
        """Why the run ended."""
        self._has_failed = False
        """Whether that is an error."""
        self._tasks: asyncio.TaskGroup

    # Loop
    async def run(self) -> RunOutcome:
        """Run until the state machine issues `Finish`.

        Raises:
            RunError: when a node, a worker or an engine failed; the message says which one and why. If too
                many groups were refused, the run was saved before.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                endless = [self._spawn(self._poll(w)) for w in range(self._run.plan.cluster.num_devices)]
                endless.append(self._spawn(self._run.workers.watch()))
                if self._save_seconds is not None:
                    endless.append(self._spawn(self._request_checkpoints(self._save_seconds)))
                if self._point is not None:
                    await self._saving.restore(self._point, self._batches.locations)
                self._enqueue(ev.Started())
                await self._loop()
                await self._recovery.finish()
                for task in endless:
                    task.cancel()
        except* Exception as group:  # noqa: BLE001 - unwrapped and raised again below
            raise _first_exception(group) from None
        finally:
            await self._read_last_lines()
        assert self._reason is not None
        self._batches.texts.report_refused(self._num_steps_done)
        if self._has_failed:
            raise RunError(self._reason)
        return RunOutcome(self._reason, self._num_steps_done)

    def stop(self, problem: str | None = None) -> None:
        """Ask the run to end: the steps that have begun are completed, and the run is saved.

        `problem` is the error that it ends with; None: the user asks for it.
        """
        self._enqueue(ev.StopRequested(problem))

    async def _loop(self) -> None:
        while self._reason is None:
            await asyncio.sleep(0)
            received = [await self._events.get()]
            num_events = 0
            while not self._events.empty() and num_events < ROUND_EVENTS:
                received.append(self._events.get_nowait())
                num_events += len(received[-1][1])
            messages = WorkerMessages()
            for worker, events in received:
                for event in events:
                    if worker is not None:
                        # What a worker reports is recorded here, so that ledger and state are of one moment.
                        event = self._translate(worker, event)
                    elif isinstance(event, ev.EngineLost):
                        self._recovery.mark_lost(event.replica)
                    elif isinstance(event, ev.EngineBack):
                        self._continue_on(self._recovery.worker_of(event.replica), messages)
                    for instruction in self._state.handle(event):
                        self._run.ledger.record_instruction(instruction)
                        self._perform(instruction, messages)
            self._send(messages)

    async def _request_checkpoints(self, seconds: float) -> None:
        """Ask for a checkpoint whenever the last one is so old."""
        while True:
            remaining = self._saving.saved_at + seconds - time.monotonic()
            if remaining > 0:
                await asyncio.sleep(remaining)
            else:
                self._enqueue(ev.CheckpointDue())
                await self._saving.wait_until_taken()

    def _enqueue(self, *events: ev.Event) -> None:
        self._events.put_nowait((None, events))

    async def _enqueue_result(self, work: Awaitable[Sequence[ev.Event]]) -> None:
        self._enqueue(*await work)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    def _spawn_answer(self, replica: str, work: Awaitable[Sequence[ev.Event]]) -> None:
        """Enqueue what an engine answers, unless it is lost from now on."""
        self._spawn(self._enqueue_result(self._recovery.answer(replica, work)))

    def _spawn_report(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._spawn(work)
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)
        return task

    def _send(self, messages: WorkerMessages) -> None:
        away = self._recovery.away
        for worker, groups in messages.groups.items():
            if worker not in away:
                self._spawn(self._run.workers.open_groups(worker, groups))
        for worker, computes in messages.computes.items():
            if worker not in away:
                self._spawn(self._run.workers.compute(worker, computes))

    def _continue_on(self, worker: int, messages: WorkerMessages) -> None:
        """Let a worker that was replaced do what it was asked for and has not reported.

        Its unfinished samples begin again from their rows. Those that were refused meanwhile end here.
        """
        tasks: list[GroupTask] = []
        for name, stream in self._streams.items():
            at_worker = partial(self._run.placer.is_at, worker, name)
            for group, samples in self._state.generating(name):
                row = self._cursors[name].row(group)
                if row is not None and at_worker(group):
                    tasks.append(GroupTask(name, group, row, samples))
                    self._run.ledger.record_restarted(name, samples, self._recovery.failure(worker))
            for sample in sorted(self._state.abandoned(name)):
                if at_worker(sample // stream.group_size):
                    self._release_engine(name, sample)
                    self._enqueue(ev.NodeFailed(stream.source, sample, ev.Refusal.FAILED))
        messages.groups[worker] = tasks
        computing = [task for home, task in self._computing.values() if home == worker]
        messages.computes[worker] = [self._of_remaining(task) for task in computing]
        self._run.metrics.forget_worker(worker)
        self._recovery.away.discard(worker)

    def _of_remaining(self, task: ComputeTask) -> ComputeTask:
        """Return a task for those of its samples that have not been refused since it was sent."""
        samples = self._state.remaining_samples(task.node, task.key)
        return task if samples is None else task._replace(samples=samples)

    # Worker -> controller
    async def _poll(self, worker: int) -> None:
        while True:
            try:
                report: WorkerReport = await self._run.workers.poll(worker, self._num_lines[worker])
            except WorkerFailureError as failure:
                await self._recovery.replace(worker, failure)
                self._num_lines[worker] = 0
                continue
            self._run.metrics.add_report(report)
            for span in report.spans:
                self._run.observer.on_span(worker, span)
            for retry in report.retries:
                self._run.observer.on_retry(worker, retry)
            self._report_lines(worker, report.lines)
            self._events.put_nowait((worker, report.events))
            if values := self._run.metrics.refresh(self._state.rollout_counts):
                self._report_rollout(values)

    def _report_rollout(self, values: Mapping[str, float]) -> None:
        """Report the present counts, and the samples that are finished of those wanted."""
        wanted = self._num_wanted
        finished = self._state.num_generated().items()
        samples = {name: (min(number, wanted[name]), wanted[name]) for name, number in finished}
        self._run.observer.on_rollout(values, samples)

    def _report_lines(self, worker: int, lines: Sequence[BodyLine]) -> None:
        if lines:
            self._num_lines[worker] += len(lines)
            self._run.observer.on_body_lines(worker, lines)

    async def _read_last_lines(self) -> None:
        """Report what bodies have printed since the last poll, as far as workers still answer."""

        async def read(worker: int) -> None:
            with suppress(Exception):  # what ended the run is more important
                lines = self._run.workers.body_lines(worker, self._num_lines[worker])
                self._report_lines(worker, await asyncio.wait_for(lines, LAST_LINES_SECONDS))

        await asyncio.gather(*map(read, range(self._run.plan.cluster.num_devices)))

    def _translate(self, worker: int, event: WorkerEvent) -> ev.Event:
        """Return the state machine's event for a worker's event, and record the worker's."""
        match event:
            case SampleReady():
                self._run.ledger.record_result(event)
                if not self._state.is_abandoned(event.stream, event.sample):
                    self._batches.locations[event.stream].add_sample(event.sample, worker, event.length)
                    self._saving.add_finished(event)
                    self._run.metrics.add_sample(event, is_trained=self._is_trained(event.stream))
                self._release_engine(event.stream, event.sample)
                self._add_reward(event.stream, self._streams[event.stream].source, event.sample, event.value)
                return ev.SampleDone(event.stream, event.sample, event.oldest)
            case ComputeReady():
                self._computing.pop((event.node, event.key), None)
                self._run.ledger.record_result(event)
                self._run.metrics.add_result(event)
                self._add_reward(self._nodes[event.node].stream, event.node, event.key, event.value)
                return ev.NodeDone(event.node, event.key, event.keep)
            case Failed():
                self._computing.pop((event.node, event.key), None)
                if stream := self._stream_of_source.get(event.node):
                    self._release_engine(stream, event.key)
                return ev.NodeFailed(event.node, event.key, ev.Refusal(event.reason), event.message)

    def _add_reward(self, stream: str, node: str, key: int, value: float | None) -> None:
        if stream in self._samplers:
            self._samplers[stream].add_reward(node, key, value)

    def _is_trained(self, stream: str) -> bool:
        return self._streams[stream].batch is not None

    def _release_engine(self, stream: str, sample: int) -> None:
        """Note that no engine works on a sample any more."""
        self._run.placer.finished(stream, sample // self._streams[stream].group_size)

    # Controller -> worker
    def _perform(self, instruction: ev.Instruction, messages: WorkerMessages) -> None:
        match instruction:
            case ev.OpenGroup():
                self._open_group(instruction, messages)
            case ev.RunSample(node, sample):
                self._add_compute(messages, node, sample, (sample,))
            case ev.RunGroup(node, group, samples):
                self._add_compute(messages, node, group, samples)
            case ev.RunStreamingInference():
                self._spawn(self._enqueue_result(self._streaming.run(instruction)))
            case ev.Refuse():
                self._refuse(instruction)
            case ev.FormBatch():
                self._form_batch(instruction)
            case ev.RunBatch(node, step):
                is_save = node.startswith(SAVE_PREFIX)
                self._spawn(self._run_save(node, step) if is_save else self._run_batch_node(node, step))
            case ev.Publish(replica, version):
                self._spawn_answer(replica, self._engines.publish(replica, version))
            case ev.Wake(replica, version):
                self._spawn_answer(replica, self._engines.wake(replica, version))
            case ev.Sleep(replica, level):
                self._spawn_answer(replica, self._engines.sleep(replica, level))
            case ev.StepDone(step):
                self._last_close = self._spawn_report(self._close_step(step, self._last_close))
            case ev.TakeCheckpoint(snapshot):
                self._take_checkpoint(snapshot)
            case ev.Finish(reason, error):
                self._reason, self._has_failed = reason, error

    def _open_group(self, instruction: ev.OpenGroup, messages: WorkerMessages) -> None:
        stream, group, samples = instruction.stream, instruction.group, instruction.samples
        row = self._cursors[stream].row(group)
        if row is None:
            self._enqueue(ev.Exhausted(stream, group))
            return
        if instruction.is_continued:
            worker, journals = self._run.placer.home(stream, group), self._saving.journals(stream, samples)
        else:
            worker, journals = self._run.placer.place(stream, group, len(samples)), None
            version, reason = self._state.engine_version(stream), self._cursors[stream].reason(group)
            self._run.ledger.record_issued(instruction, row, worker, version, reason)
        messages.groups[worker].append(GroupTask(stream, group, row, samples, journals))

    def _add_compute(self, messages: WorkerMessages, node: str, key: int, samples: tuple[int, ...]) -> None:
        stream = self._streams[self._nodes[node].stream]
        worker = self._run.placer.home(stream.name, samples[0] // stream.group_size)
        task = ComputeTask(node, key, samples)
        messages.computes[worker].append(task)
        self._computing[node, key] = worker, task

    def _refuse(self, instruction: ev.Refuse) -> None:
        stream, group, samples = instruction.stream, instruction.group, instruction.samples
        self._run.metrics.add_refused(instruction.reason, len(samples))
        if stream in self._samplers:
            self._samplers[stream].refuse(group, samples)
        if self._is_trained(stream):
            self._run.metrics.forget_samples(stream, samples)
        else:
            num_before = self._refused_in_evaluation.get(stream, 0)
            self._refused_in_evaluation[stream] = num_before + len(samples)
        self._saving.forget(stream, samples)
        self._run.observer.on_refusal(instruction.node, instruction.reason, instruction.message)
        home = self._run.placer.home(stream, group)
        self._run.placer.refused(stream, group, len(samples))
        self._spawn(self._free_refused(instruction, home))

    async def _free_refused(self, refusal: ev.Refuse, home: int) -> None:
        """Free the data of refused samples on their home worker and on workers with copies."""
        stream, samples = refusal.stream, refusal.samples
        await self._streaming.wait_until_unused(stream, samples)
        await self._batches.texts.read_refused(refusal, home)
        locations = self._batches.locations[stream]
        samples_of = {**locations.workers_of(samples), home: samples}
        locations.forget(samples)
        await asyncio.gather(
            *(self._release.release(worker, ids, stream, None) for worker, ids in samples_of.items())
        )

    # Batches
    def _form_batch(self, instruction: ev.FormBatch) -> None:
        stream, step, samples = self._streams[instruction.stream], instruction.step, instruction.samples
        is_evaluation = not self._is_trained(stream.name)
        num_refused = self._refused_in_evaluation.get(stream.name)
        if is_evaluation:
            if num_refused is not None:
                self._refused_in_evaluation[stream.name] = 0
            self._cursors[stream.name].restart()
        else:
            self._run.metrics.add_batch(stream.name, step, samples, stream.group_size)
            if stream.name in self._samplers:
                self._samplers[stream.name].form_batch(instruction.groups, samples)
        self._run.placer.bound(stream.name, instruction.groups)
        self._saving.forget(stream.name, samples)
        batch = StepBatch(stream.name, step, samples, instruction.groups, stream.group_size, num_refused)
        self._batches.add_batch(batch)
        summary = self._spawn_report(self._batches.summarize(batch, is_evaluation))
        self._summaries[stream.name, step] = summary
        self._report_rollout(self._state.rollout_counts())

    async def _run_batch_node(self, node: str, step: int) -> None:
        await self._batches.run_node(node, step)
        self._enqueue(ev.NodeDone(node, step))
        await self._batches.free_token_fields(node, step)

    async def _close_step(self, step: int, before: asyncio.Task[None] | None) -> None:
        """Report a completed step, after the one before, and free its samples."""
        # Now, as the workers' answers may take longer than the next step.
        counts = self._state.rollout_counts()
        for key in [key for key in self._summaries if key[1] == step]:
            await self._summaries.pop(key)
        await self._batches.close_step(step)
        if before is not None:
            await asyncio.wait([before])
        if step < self._run.plan.schedule.num_steps:
            self._num_steps_done = step + 1
            self._run.observer.on_step(step, self._run.metrics.finish_step(step, counts))
            self._batches.step_reported(step + 1)

    # Saving
    async def _run_save(self, node: str, step: int) -> None:
        model = node.removeprefix(SAVE_PREFIX)
        workers = next(r.workers for r in self._run.plan.replicas if r.model == model and r.role != "gen")
        with self._run.working(OngoingWork(f"save {model}", DEVICE, workers, time.time(), step + 1)):
            await self._saving.copy_model(model, step + 1)
        self._enqueue(ev.NodeDone(node, step))

    def _take_checkpoint(self, snapshot: RunSnapshot) -> None:
        is_last = self._state.is_last_checkpoint(snapshot)
        samplers = {stream: sampler.save() for stream, sampler in self._samplers.items()}
        self._spawn(self._saving.take(snapshot, tuple(self._reports), samplers, is_last=is_last))


def _first_exception(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception of nested groups: if a worker failed, that which a restart may fix.

    Other exceptions may follow from it. If they do not, they are raised again after the restart.
    """
    if (failures := group.subgroup(WorkerFailureError)) is not None:
        group = failures
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
