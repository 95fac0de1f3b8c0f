"""`ComputeRunner`: per-sample and per-group bodies, from their order to fields in the store."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from hflow.data.batch import Batch, Column
from hflow.data.row_arguments import CallLevel, bind_rows, unpack_rows
from hflow.errors import RunError
from hflow.types import Unit
from hflow.workers.bodies.pool import Pool, PoolBody
from hflow.workers.bodies.pool_child import JobResult
from hflow.workers.interface import ComputeOrder, ComputeReady, Failed, NodeProgram, WorkerEvent
from hflow.workers.storage.sample_store import SampleStore

EventSink = Callable[[Sequence[WorkerEvent]], None]

SAMPLE_RELEASED = "its sample left the run"
"""The answer to an order that came too late; whoever refused the sample expects an answer."""


@dataclass(frozen=True, eq=False)
class _Round:
    """Calls of one body that were bound together."""

    program: NodeProgram
    shape: Batch
    """Their samples, without columns."""
    sink: EventSink


@dataclass(frozen=True)
class _Call:
    """A body that was called and has not answered yet."""

    round: _Round
    rows: range
    """Where its samples are in the round's shape."""

    @property
    def samples(self) -> list[int]:
        """Its samples."""
        found: list[int] = self.round.shape.samples[self.rows.start : self.rows.stop].tolist()
        return found


class ComputeRunner:
    """Binds inputs, sends them to the pool, stores what comes back.

    Args:
        programs: the compute nodes that fire by sample or by group, and those of such a level
            that fire by batch.
        store: where inputs come from and outputs go.
        num_processes: of the pool.
        on_error: takes an exception that ends the run.
    """

    def __init__(
        self,
        programs: Mapping[str, NodeProgram],
        store: SampleStore,
        num_processes: int,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._programs = programs
        self._store = store
        self._on_error = on_error
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, int], _Call] = {}
        self._maps: set[queue.SimpleQueue[Sequence[WorkerEvent] | BaseException]] = set()
        bodies = {name: _pool_body(program) for name, program in programs.items()}
        self._pool = Pool(bodies, num_processes, self._take, self._fail)

    def submit(self, orders: Iterable[ComputeOrder], sink: EventSink) -> None:
        """Queue bodies; `sink` receives a `ComputeReady` or `Failed` for each order."""
        by_node: dict[str, list[ComputeOrder]] = defaultdict(list)
        for order in orders:
            by_node[order.node].append(order)
        for node, held in by_node.items():
            self._submit(self._programs[node], held, sink)

    def _submit(self, program: NodeProgram, orders: Sequence[ComputeOrder], sink: EventSink) -> None:
        """Bind the calls of one node together; one by one where samples were released meanwhile."""
        samples = [sample for order in orders for sample in order.samples]
        fields = read_fields(program, program.stream)
        inputs = self._store.gather_if_present(program.stream, fields, samples)
        if inputs is None and len(orders) == 1:
            sink([Failed(program.name, orders[0].key, "failed", SAMPLE_RELEASED)])
        elif inputs is None:
            for order in orders:
                self._submit(program, [order], sink)
        else:
            sizes = [len(order.samples) for order in orders]
            arguments = bind_rows(program, inputs, sizes, row_level(program))
            self._note(_Round(program, inputs.select(()), sink), orders)
            keys = [order.key for order in orders]
            self._pool.submit(program.name, dict(zip(keys, arguments, strict=True)))

    def _note(self, held: _Round, orders: Iterable[ComputeOrder]) -> None:
        first = 0
        with self._lock:
            for order in orders:
                end = first + len(order.samples)
                self._calls[order.node, order.key] = _Call(held, range(first, end))
                first = end

    def cancel(self, samples: Iterable[int]) -> None:
        """Stop bodies whose samples were all released; each of them answers once more, as failed."""
        released = set(samples)
        with self._lock:
            calls = [(n, call) for n, call in self._calls.items() if _speaks_of(call, n[1], released)]
        gone = [n for n, call in calls if not self._store.has_any(call.round.program.stream, call.samples)]
        if gone:
            self._pool.cancel(gone)

    def map(self, node: str, samples: Sequence[int]) -> None:
        """Run a per-sample or per-group body on all samples of a batch, and wait.

        Raises:
            RunError: when it failed on any of them: a batch that is formed cannot refuse samples.
        """
        orders = self._orders(node, samples)
        answers: queue.SimpleQueue[Sequence[WorkerEvent] | BaseException] = queue.SimpleQueue()
        self._maps.add(answers)
        self.submit(orders, answers.put)
        num_left = len(orders)
        while num_left:
            answer = answers.get()
            if isinstance(answer, BaseException):
                raise answer
            num_left -= len(answer)
            for event in answer:
                if isinstance(event, Failed):
                    raise RunError(f"on {row_level(self._programs[node])} {event.key}: {event.message}")
        self._maps.discard(answers)

    def close(self) -> None:
        """End the pool's processes."""
        self._pool.close()

    def _orders(self, node: str, samples: Sequence[int]) -> list[ComputeOrder]:
        program = self._programs[node]
        if row_level(program) == "sample":
            return [ComputeOrder(node, sample, (sample,)) for sample in samples]
        members: dict[int, list[int]] = defaultdict(list)
        for sample in samples:
            members[self._store.group(program.stream, sample)].append(sample)
        return [ComputeOrder(node, group, tuple(held)) for group, held in members.items()]

    # ------------------------------------------------------------------- the pool's thread
    def _take(self, outcomes: Sequence[JobResult]) -> None:
        rounds: dict[_Round, list[tuple[JobResult, range]]] = defaultdict(list)
        with self._lock:
            for outcome in outcomes:
                call = self._calls.pop((outcome.node, outcome.key))
                rounds[call.round].append((outcome, call.rows))
        for held, answered in rounds.items():
            held.sink(self._settle(held, answered))

    def _settle(self, held: _Round, answered: Sequence[tuple[JobResult, range]]) -> list[WorkerEvent]:
        events: list[WorkerEvent] = [
            Failed(outcome.node, outcome.key, outcome.reason, outcome.message)
            for outcome, _ in answered
            if outcome.reason is not None
        ]
        done = [(outcome, rows) for outcome, rows in answered if outcome.reason is None]
        return [*events, *self._stored(held, done)] if done else events

    def _stored(self, held: _Round, done: Sequence[tuple[JobResult, range]]) -> list[ComputeReady]:
        """Put the results of a round's calls away."""
        program = held.program
        batch = held.shape.take([row for _, rows in done for row in rows])
        sizes = [len(rows) for _, rows in done]
        results = [outcome.value for outcome, _ in done]
        columns, metrics = unpack_rows(program.name, program, results, batch, sizes, row_level(program))
        self._store.add(program.stream, batch.with_columns(columns))
        if program.metrics:
            for (_, rows), values in zip(done, metrics, strict=True):
                samples = _Call(held, rows).samples
                self._store.add_metrics(program.stream, program.name, samples, values)
        keeps = _keeps(columns.get("keep"), sizes)
        numbers = _numbers(program, columns, len(done))
        return [
            ComputeReady(outcome.node, outcome.key, keep, number)
            for (outcome, _), keep, number in zip(done, keeps, numbers, strict=True)
        ]

    def _fail(self, error: BaseException) -> None:
        for answers in tuple(self._maps):
            answers.put(error)
        self._on_error(error)


def _speaks_of(call: _Call, key: int, samples: Set[int]) -> bool:
    """Whether a call works on any of these samples."""
    if row_level(call.round.program) == "sample":
        return key in samples
    return not samples.isdisjoint(call.samples)


def read_fields(program: NodeProgram, stream: str) -> list[str]:
    """`stream/field` names of what a body on `stream` needs; PerToken floats are masked when bound."""
    fields = {f"{read.stream}/{read.field}" for read in program.reads}
    if any(read.unit is Unit.TOKEN for read in program.reads):
        fields.add(f"{stream}/loss_mask")
    return sorted(fields)


def row_level(program: NodeProgram) -> CallLevel:
    """Whether a body is called for a sample or for a group."""
    return "group" if program.level == "group" else "sample"


def _keeps(column: Column | None, sizes: Sequence[int]) -> list[bool]:
    """Whether each call said to keep all of its samples."""
    if column is None:
        return [True] * len(sizes)
    firsts = np.cumsum([0, *sizes[:-1]])
    kept: list[bool] = np.logical_and.reduceat(column.values, firsts).tolist()
    return kept


def _numbers(program: NodeProgram, columns: Mapping[str, Column], num_calls: int) -> Sequence[float | None]:
    """The number that the controller is told of each call's sample."""
    if program.reported is None:
        return [None] * num_calls
    found: list[float] = np.asarray(columns[program.reported].values, dtype=float).tolist()
    return found


def _pool_body(program: NodeProgram) -> PoolBody:
    options = program.options
    return PoolBody(
        program.body, options.get("timeout"), options.get("retries", 0), options.get("concurrency")
    )
