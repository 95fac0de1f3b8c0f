"""`EncodeRunner`: encode bodies, one after the other on a thread: texts -> trajectories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hflow.data.row_arguments import bind_rows
from hflow.errors import DataError, NotYetError
from hflow.planner.ir import Plan
from hflow.types import Tokenizer
from hflow.workers.bodies.compute_runner import SAMPLE_RELEASED, EventSink, read_fields
from hflow.workers.error_location import blame
from hflow.workers.interface import ComputeOrder, ComputeReady, Failed, GroupOrder, NodeProgram, WorkerEvent
from hflow.workers.storage.dataset_rows import DatasetRow, row_error
from hflow.workers.storage.sample_store import SampleStore
from hflow.workers.storage.sample_writer import SampleWriter


class EncodeRunner:
    """Opens groups of written samples, and views of samples that exist.

    A body that raises refuses its sample. A `DataError` of a source speaks of the dataset's row, and
    ends the run; a view reads what a model wrote, and refuses.

    Args:
        plan: for the streams that the nodes open.
        programs: the encode nodes.
        store: where samples go.
        tokenizers: model -> its tokenizer, used by this thread only.
        on_error: takes an exception that ends the run.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Mapping[str, NodeProgram],
        store: SampleStore,
        tokenizers: Mapping[str, Tokenizer],
        on_error: Callable[[BaseException], None],
    ) -> None:
        for program in programs.values():
            if program.options.get("timeout") is not None:
                raise NotYetError(f"encode node {program.name!r} cannot be timed yet; remove its timeout")
        self._plan = plan
        self._programs = programs
        self._openers = {
            name: SampleWriter.of(program, plan.graph, store) for name, program in programs.items()
        }
        self._store = store
        self._tokenizers = tokenizers
        self._on_error = on_error
        self._thread = ThreadPoolExecutor(1, "hflow-encode")

    def open_groups(self, orders: Sequence[tuple[GroupOrder, DatasetRow]], sink: EventSink) -> None:
        """Queue groups of written streams; they are answered together."""
        self._queue(lambda: sink([event for order, row in orders for event in self._opened(order, row)]))

    def view(self, orders: Sequence[ComputeOrder], sink: EventSink) -> None:
        """Queue samples of streams that derive from others; they are answered together."""
        self._queue(lambda: sink([self._viewed(order) for order in orders]))

    def close(self) -> None:
        """Drop what is queued."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _queue(self, work: Callable[[], None]) -> None:
        self._thread.submit(self._guarded, work)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the poll raises it
            self._on_error(error)

    def _opened(self, order: GroupOrder, row: DatasetRow) -> Sequence[WorkerEvent]:
        source = self._plan.graph.stream(order.stream).source
        program, opener = self._programs[source], self._openers[source]
        arguments = {read.parameter: row[read.field][1] for read in program.reads}
        try:
            result, failure = self._call(program, {**program.knobs, **arguments})
        except DataError as error:
            raise row_error(self._plan, order, error) from error
        if failure:
            return [Failed(source, sample, "failed", failure) for sample in order.samples]
        members = opener.members(result, len(order.samples))
        return [
            opener.put(sample, order.group, member, row)
            for sample, member in zip(order.samples, members, strict=True)
        ]

    def _viewed(self, order: ComputeOrder) -> WorkerEvent:
        program = self._programs[order.node]
        (sample,) = order.samples
        source = program.reads[0].stream
        inputs = self._store.gather_if_present(source, read_fields(program, source), order.samples)
        if inputs is None:
            return Failed(order.node, order.key, "failed", SAMPLE_RELEASED)
        (arguments,) = bind_rows(program, inputs, [1], "sample")
        try:
            result, failure = self._call(program, arguments)
        except DataError as error:
            return Failed(order.node, order.key, "failed", blame(error, program.body))
        if failure:
            return Failed(order.node, order.key, "failed", failure)
        opener = self._openers[order.node]
        (member,) = opener.members(result, 1)
        opener.put(sample, int(inputs.groups[0]), member, {}, parent=source)
        return ComputeReady(order.node, order.key)

    def _call(self, program: NodeProgram, arguments: Mapping[str, Any]) -> tuple[Any, str]:
        """The body's result, or what its last try failed with.

        Raises:
            DataError: when it cannot read its inputs; a further try would not either.
        """
        tokenizers = {
            name: self._tokenizers[program.models[0]]
            for name, kind in program.provided
            if kind == "tokenizer"
        }
        failure = ""
        for _ in range(1 + program.options.get("retries", 0)):
            try:
                return program.body(**arguments, **tokenizers), ""
            except DataError:
                raise
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - as a body may
                failure = blame(error, program.body)
        return None, failure
