"""`EncodeRunner`: runs encode bodies (texts -> trajectories), one after the other on a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hflow.base.errors import DataError, ReturnError
from hflow.data.batches.row_arguments import bind_rows
from hflow.planner.plan.rows import Plan
from hflow.processes.error_location import error_with_location
from hflow.types import Tokenizer
from hflow.workers.bodies.body_output import body_call
from hflow.workers.bodies.compute_runner import SAMPLE_RELEASED, EventSink, input_fields
from hflow.workers.interface import ComputeReady, ComputeTask, Failed, GroupTask, NodeProgram, WorkerEvent
from hflow.workers.storage.dataset_rows import DatasetRow, body_arguments, row_error
from hflow.workers.storage.sample_store import SampleStore
from hflow.workers.storage.sample_writer import SampleResult, SampleWriter


class EncodeRunner:
    """Makes the samples of encode nodes, from dataset rows or from samples of another stream.

    A body that raises, or returns something else than it declares, refuses its sample. A `DataError` ends the
    run where the body reads a dataset row, as the data is wrong; where it reads what a model wrote, it only
    refuses the sample.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Mapping[str, NodeProgram],
        store: SampleStore,
        tokenizers: Mapping[str, Tokenizer],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._plan = plan
        self._programs = programs
        self._writers = {
            name: SampleWriter.for_node(program, plan, store) for name, program in programs.items()
        }
        self._store = store
        self._tokenizers = tokenizers
        self._on_error = on_error
        self._thread = ThreadPoolExecutor(1, "hflow-encode")

    def open_groups(self, tasks: Sequence[tuple[GroupTask, DatasetRow]], sink: EventSink) -> None:
        """Queue groups that start from dataset rows; `sink` receives all their events in one call."""
        self._queue(lambda: sink([event for task, row in tasks for event in self._open(task, row)]))

    def derive(self, tasks: Sequence[ComputeTask], sink: EventSink) -> None:
        """Queue samples that derive from existing ones; `sink` receives all their events in one call."""
        self._queue(lambda: sink([self._derive(task) for task in tasks]))

    def close(self) -> None:
        """End the thread; queued work is dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _queue(self, work: Callable[[], None]) -> None:
        self._thread.submit(self._run, work)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the next poll raises it
            self._on_error(error)

    def _open(self, task: GroupTask, row: DatasetRow) -> Sequence[WorkerEvent]:
        source = self._plan.graph.stream(task.stream).source
        program, writer = self._programs[source], self._writers[source]
        arguments = {**program.knobs, **body_arguments(program, row)}
        try:
            members, failure = self._call(program, arguments, task.samples)
        except DataError as error:
            raise row_error(row, error) from error
        if failure:
            return [Failed(source, sample, "failed", failure) for sample in task.samples]
        return [
            writer.write(sample, task.group, member, row)
            for sample, member in zip(task.samples, members, strict=True)
        ]

    def _derive(self, task: ComputeTask) -> WorkerEvent:
        program = self._programs[task.node]
        (sample,) = task.samples
        parent = program.reads[0].stream
        inputs = self._store.gather_if_present(parent, input_fields(program, parent), task.samples)
        if inputs is None:
            return Failed(task.node, task.key, "failed", SAMPLE_RELEASED)
        (arguments,) = bind_rows(program, inputs, [1], "sample")
        try:
            members, failure = self._call(program, arguments, task.samples)
        except DataError as error:
            return Failed(task.node, task.key, "failed", error_with_location(error, program.body))
        if failure:
            return Failed(task.node, task.key, "failed", failure)
        self._writers[task.node].write(sample, int(inputs.groups[0]), members[0], DatasetRow(), parent=parent)
        return ComputeReady(task.node, task.key)

    def _call(
        self, program: NodeProgram, arguments: Mapping[str, Any], samples: Sequence[int]
    ) -> tuple[list[SampleResult], str]:
        """Call a body up to `1 + retries` times. Returns each sample's result, and the last failure or "".

        Raises:
            DataError: when the body cannot read its inputs, which another attempt would not change.
        """
        tokenizers = {
            name: self._tokenizers[program.models[0]]
            for name, kind in program.provided
            if kind == "tokenizer"
        }
        failure = ""
        for _ in range(1 + program.options.get("retries", 0)):
            try:
                with body_call(program.body, program.name, samples[0]):
                    result = program.body(**arguments, **tokenizers)
            except DataError:
                raise
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - a body may raise anything
                failure = error_with_location(error, program.body)
                continue
            try:
                return self._writers[program.name].read_group(result, len(samples)), ""
            except ReturnError as error:
                failure = str(error).removeprefix(f"node {program.name!r}: ")
        return [], failure
