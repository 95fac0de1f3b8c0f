"""`Computes`: per-sample and per-group bodies, from their order to fields in the store."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hflow.data.batch import Batch
from hflow.data.binding import bind_rows, unpack_rows
from hflow.errors import RunError
from hflow.types import Unit
from hflow.workers.base import ComputeOrder, ComputeReady, Failed, NodeProgram, WorkerEvent
from hflow.workers.pool import Pool, PoolBody
from hflow.workers.pool_child import Outcome
from hflow.workers.store import Store

Sink = Callable[[Sequence[WorkerEvent]], None]

RELEASED = "its sample left the run"
"""The answer to an order that came too late; whoever refused the sample expects an answer."""


@dataclass(frozen=True)
class _Call:
    """A body that was called and has not answered yet."""

    samples: tuple[int, ...]
    inputs: Batch
    sink: Sink


class Computes:
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
        store: Store,
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

    def submit(self, orders: Iterable[ComputeOrder], sink: Sink) -> None:
        """Queue bodies; `sink` receives a `ComputeReady` or `Failed` for each order."""
        arguments: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        for order in orders:
            program = self._programs[order.node]
            inputs = self._store.gather_held(
                program.stream, read_fields(program, program.stream), order.samples
            )
            if inputs is None:
                sink([Failed(order.node, order.key, "failed", RELEASED)])
                continue
            arguments[order.node][order.key] = bind_rows(program, inputs, row_level(program))
            with self._lock:
                self._calls[order.node, order.key] = _Call(order.samples, inputs, sink)
        for node, calls in arguments.items():
            self._pool.submit(node, calls)

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
    def _take(self, outcomes: Sequence[Outcome]) -> None:
        answers: dict[Sink, list[WorkerEvent]] = defaultdict(list)
        for outcome in outcomes:
            with self._lock:
                call = self._calls.pop((outcome.node, outcome.key))
            answers[call.sink].append(self._settle(call, outcome))
        for sink, events in answers.items():
            sink(events)

    def _settle(self, call: _Call, outcome: Outcome) -> WorkerEvent:
        if outcome.reason is not None:
            return Failed(outcome.node, outcome.key, outcome.reason, outcome.message)
        program = self._programs[outcome.node]
        columns, metrics = unpack_rows(outcome.node, program, outcome.value, call.inputs, row_level(program))
        self._store.add(program.stream, call.inputs.select(()).with_columns(columns))
        put_metrics(self._store, program.stream, program.name, call.samples, metrics)
        keep = columns.get("keep")
        return ComputeReady(outcome.node, outcome.key, keep is None or bool(np.all(keep.values)))

    def _fail(self, error: BaseException) -> None:
        for answers in tuple(self._maps):
            answers.put(error)
        self._on_error(error)


def read_fields(program: NodeProgram, stream: str) -> list[str]:
    """`stream/field` names of what a body on `stream` needs; PerToken floats are masked when bound."""
    fields = {f"{read.stream}/{read.field}" for read in program.reads}
    if any(read.unit is Unit.TOKEN for read in program.reads):
        fields.add(f"{stream}/loss_mask")
    return sorted(fields)


def row_level(program: NodeProgram) -> Literal["sample", "group"]:
    """Whether a body is called for a sample or for a group."""
    return "group" if program.level == "group" else "sample"


def put_metrics(
    store: Store, stream: str, node: str, samples: Sequence[int], metrics: Mapping[str, Any]
) -> None:
    """Keep what a body reports beside its fields, so that it is averaged over the batch."""
    for name, value in metrics.items():
        store.add_value(stream, f"{node}.{name}", Unit.SEQUENCE, samples, float(value))


def _pool_body(program: NodeProgram) -> PoolBody:
    options = program.options
    return PoolBody(
        program.body, options.get("timeout"), options.get("retries", 0), options.get("concurrency")
    )
