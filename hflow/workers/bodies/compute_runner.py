"""`ComputeRunner`: runs compute bodies that are called per sample or per group."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice

import numpy as np

from hflow.base.errors import RunError
from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.returned_values import CallLevel, DeclaredReturns
from hflow.data.batches.row_arguments import bind_rows, unpack_rows
from hflow.types import Unit
from hflow.workers.bodies.body_output import LineSink
from hflow.workers.bodies.pool import Pool, PoolBody
from hflow.workers.bodies.pool_child import JobResult
from hflow.workers.interface import (
    BodyRetry,
    ComputeReady,
    ComputeTask,
    Failed,
    NodeProgram,
    Span,
    WorkerEvent,
)
from hflow.workers.storage.sample_store import SampleStore

EventSink = Callable[[Sequence[WorkerEvent]], None]
"""Takes events for the controller."""

COMPUTE_LANE = "compute"
"""The lane of the spans of bodies in the trace."""
SAMPLE_RELEASED = "its sample was released"
"""Message of the answer to a task whose sample was released meanwhile; every task gets an answer."""


class ComputeRunner:
    """Binds the inputs of bodies, calls them in the pool, and stores what they return.

    The programs are called per sample or per group, as samples come or on a formed batch (`run_on_batch`).
    `on_span` receives the time from when calls were queued together to the last of their results.
    """

    def __init__(
        self,
        programs: Mapping[str, NodeProgram],
        store: SampleStore,
        num_processes: int,
        seed: int,
        on_retry: Callable[[BodyRetry], None],
        on_error: Callable[[BaseException], None],
        on_span: Callable[[Span], None] = lambda _: None,
        on_lines: LineSink = lambda _: None,
    ) -> None:
        self._programs = programs
        self._store = store
        self._on_error = on_error
        self._on_span = on_span
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, int], _BodyCall] = {}
        """Calls without a result, by node and key."""
        self._batch_queues: set[queue.SimpleQueue[Sequence[WorkerEvent] | BaseException]] = set()
        """Queues that `run_on_batch` reads."""
        bodies = {name: _pool_body(program) for name, program in programs.items()}
        self._pool = Pool(bodies, num_processes, seed, self._take_results, on_retry, self._fail, on_lines)

    def submit(self, tasks: Iterable[ComputeTask], sink: EventSink) -> None:
        """Queue bodies; `sink` receives a `ComputeReady` or `Failed` for each task."""
        tasks_of: dict[str, list[ComputeTask]] = defaultdict(list)
        for task in tasks:
            tasks_of[task.node].append(task)
        for node, node_tasks in tasks_of.items():
            self._submit(self._programs[node], node_tasks, sink)

    def cancel(self, samples: Iterable[int]) -> None:
        """Stop bodies whose samples were all released; each of them is reported once, as failed."""
        released = set(samples)
        with self._lock:
            calls = [(job, call) for job, call in self._pending.items() if call.uses_any(job[1], released)]
        unwanted = [job for job, call in calls if not self._store.has_any(call.stream, call.samples)]
        if unwanted:
            self._pool.cancel(unwanted)

    def run_on_batch(self, node: str, samples: Sequence[int]) -> None:
        """Run a per-sample or per-group body on all samples of a formed batch, and wait.

        Raises:
            RunError: when the body failed on any of them, as a formed batch cannot refuse samples.
        """
        tasks = self._tasks(node, samples)
        events: queue.SimpleQueue[Sequence[WorkerEvent] | BaseException] = queue.SimpleQueue()
        self._batch_queues.add(events)
        self.submit(tasks, events.put)
        num_pending = len(tasks)
        while num_pending:
            received = events.get()
            if isinstance(received, BaseException):
                raise received
            num_pending -= len(received)
            for event in received:
                if isinstance(event, Failed):
                    raise RunError(f"on {call_level(self._programs[node])} {event.key}: {event.message}")
        self._batch_queues.discard(events)

    def read_output(self) -> None:
        """Pass on what bodies have printed so far."""
        self._pool.read_output()

    def close(self) -> None:
        """End the pool's processes."""
        self._pool.close()

    def _tasks(self, node: str, samples: Sequence[int]) -> list[ComputeTask]:
        program = self._programs[node]
        if call_level(program) == "sample":
            return [ComputeTask(node, sample, (sample,)) for sample in samples]
        members_of: dict[int, list[int]] = defaultdict(list)
        for sample in samples:
            members_of[self._store.group(program.stream, sample)].append(sample)
        return [ComputeTask(node, group, tuple(members)) for group, members in members_of.items()]

    def _submit(self, program: NodeProgram, tasks: Sequence[ComputeTask], sink: EventSink) -> None:
        """Bind the calls of one node together, or one by one if a sample was released meanwhile."""
        samples = [sample for task in tasks for sample in task.samples]
        fields = input_fields(program, program.stream)
        inputs = self._store.gather_if_present(program.stream, fields, samples)
        if inputs is None and len(tasks) == 1:
            sink([Failed(program.name, tasks[0].key, "failed", SAMPLE_RELEASED)])
        elif inputs is None:
            for task in tasks:
                self._submit(program, [task], sink)
        else:
            sizes = [len(task.samples) for task in tasks]
            arguments = bind_rows(program, inputs, sizes, call_level(program))
            batch = _CallBatch(program, inputs.select(()), sink, time.time(), num_pending=len(tasks))
            self._add_pending(batch, tasks)
            keys, tokens = [task.key for task in tasks], iter(inputs.lengths.tolist())
            lengths = [tuple(islice(tokens, size)) for size in sizes]
            self._pool.submit(
                program.name,
                dict(zip(keys, arguments, strict=True)),
                dict(zip(keys, lengths, strict=True)),
            )

    def _add_pending(self, batch: _CallBatch, tasks: Iterable[ComputeTask]) -> None:
        start = 0
        with self._lock:
            for task in tasks:
                stop = start + len(task.samples)
                self._pending[task.node, task.key] = _BodyCall(batch, range(start, stop))
                start = stop

    # On the pool's thread

    def _take_results(self, results: Sequence[JobResult]) -> None:
        results_of: dict[_CallBatch, list[tuple[JobResult, range]]] = defaultdict(list)
        with self._lock:
            for result in results:
                call = self._pending.pop((result.node, result.key))
                results_of[call.batch].append((result, call.rows))
        for batch, batch_results in results_of.items():
            batch.num_pending -= len(batch_results)
            if not batch.num_pending:
                name, args = batch.program.name, {"samples": len(batch.samples)}
                self._on_span(Span(name, COMPUTE_LANE, batch.start, time.time(), args))
            batch.sink(self._events(batch, batch_results))

    def _events(self, batch: _CallBatch, results: Sequence[tuple[JobResult, range]]) -> list[WorkerEvent]:
        """Store the values that calls returned, and return an event for each call."""
        failed: list[WorkerEvent] = [
            Failed(result.node, result.key, result.reason, result.message)
            for result, _ in results
            if result.reason is not None
        ]
        succeeded = [(result, rows) for result, rows in results if result.reason is None]
        return [*failed, *self._store_values(batch, succeeded)] if succeeded else failed

    def _store_values(
        self, call_batch: _CallBatch, results: Sequence[tuple[JobResult, range]]
    ) -> list[WorkerEvent]:
        program = call_batch.program
        batch = call_batch.samples.take([row for _, rows in results for row in rows])
        sizes = [len(rows) for _, rows in results]
        values = [result.value for result, _ in results]
        columns = unpack_rows(program.returns, values, sizes, call_level(program))
        self._store.add(program.stream, batch.with_columns(columns))
        if program.metrics:
            for result, rows in results:
                samples = _BodyCall(call_batch, rows).samples
                self._store.add_metrics(program.stream, program.name, samples, result.metrics)
        keeps = _keep_flags(columns.get("keep"), sizes)
        reported = _reported_values(program, columns, len(results))
        return [
            ComputeReady(result.node, result.key, keep, value)
            for (result, _), keep, value in zip(results, keeps, reported, strict=True)
        ]

    def _fail(self, error: BaseException) -> None:
        for events in tuple(self._batch_queues):
            events.put(error)
        self._on_error(error)


@dataclass(eq=False)
class _CallBatch:
    """Calls of one body whose inputs were bound together."""

    program: NodeProgram
    samples: Batch
    """The samples of all calls, without columns."""
    sink: EventSink
    start: float
    """When the calls were queued, in seconds since the epoch."""
    num_pending: int
    """Calls without a result yet."""


@dataclass(frozen=True)
class _BodyCall:
    """A call without a result yet."""

    batch: _CallBatch
    rows: range
    """The rows of the call's samples in the batch."""

    @property
    def stream(self) -> str:
        return self.batch.program.stream

    @property
    def samples(self) -> list[int]:
        ids: list[int] = self.batch.samples.samples[self.rows.start : self.rows.stop].tolist()
        return ids

    def uses_any(self, key: int, samples: Set[int]) -> bool:
        """Return whether the call of this key works on any of these samples."""
        if call_level(self.batch.program) == "sample":
            return key in samples
        return not samples.isdisjoint(self.samples)


def input_fields(program: NodeProgram, stream: str) -> list[str]:
    """Return the `stream/field` names that a body on `stream` needs.

    They include the loss mask where the body reads per-token fields: `bind_rows` masks their floats.
    """
    fields = {f"{read.stream}/{read.field}" for read in program.reads}
    if any(read.unit is Unit.TOKEN for read in program.reads):
        fields.add(f"{stream}/loss_mask")
    return sorted(fields)


def call_level(program: NodeProgram) -> CallLevel:
    """Return whether a body is called per sample or per group."""
    return "group" if program.level == "group" else "sample"


def _keep_flags(column: Column | None, sizes: Sequence[int]) -> list[bool]:
    """Return for each call whether it keeps all of its samples."""
    if column is None:
        return [True] * len(sizes)
    starts = np.cumsum([0, *sizes[:-1]])
    flags: list[bool] = np.logical_and.reduceat(column.values, starts).tolist()
    return flags


def _reported_values(
    program: NodeProgram, columns: Mapping[str, Column], num_calls: int
) -> Sequence[float | None]:
    """Return for each call the number that is reported to the controller."""
    if program.reported is None:
        return [None] * num_calls
    values: list[float] = np.asarray(columns[program.reported].values, dtype=float).tolist()
    return values


def _pool_body(program: NodeProgram) -> PoolBody:
    names = ("timeout", "retries", "backoff", "concurrency")
    returns = DeclaredReturns(
        program.name, program.returns, program.scalars, program.metrics, call_level(program)
    )
    options = {name: program.options[name] for name in names if name in program.options}
    return PoolBody(program.body, **options, returns=returns)
