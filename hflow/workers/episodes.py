"""`Episodes`: generate bodies, all on one event loop in a thread beside the engines.

A sample starts from a row of the dataset; that of a derived stream, beside a sample that exists.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hflow.data.row_binding import bind_rows
from hflow.data.tokenizer import TextTokenizer
from hflow.errors import BackendError, DataError, HflowError
from hflow.plan.ir import Plan
from hflow.workers.base import ComputeOrder, ComputeReady, Failed, GroupOrder, NodeProgram, WorkerEvent
from hflow.workers.blame import blame
from hflow.workers.compute import RELEASED, Sink, read_fields
from hflow.workers.engine_driver import EngineDriver
from hflow.workers.episode import EpisodeEngine, sample_seed
from hflow.workers.opened import Opener, Row
from hflow.workers.patience import Patience
from hflow.workers.pool_child import too_long
from hflow.workers.rows import bad_row
from hflow.workers.starts import Start, limit_of, params_of
from hflow.workers.store import Store


class Episodes:
    """Runs an episode for every sample of a group, and answers each exactly once.

    A body that raises, or asks an engine for what it refuses, refuses its sample. Other errors of
    ours end the run: a row that the tokenizer cannot read, an engine that has failed.

    Args:
        plan: for streams and the engines that sources use.
        programs: the generate nodes.
        store: where samples go.
        drivers: generation replica -> its engine on this worker.
        tokenizers: model -> its tokenizer, used by this thread only.
        seed: of the run.
        on_error: takes an exception that ends the run.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Mapping[str, NodeProgram],
        store: Store,
        drivers: Mapping[str, EngineDriver],
        tokenizers: Mapping[str, TextTokenizer],
        seed: int,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._plan = plan
        self._programs = programs
        self._openers = {name: Opener.of(program, plan.graph, store) for name, program in programs.items()}
        self._replica = {name: plan.placement(name).replicas[0] for name in programs}
        self._store = store
        self._drivers = drivers
        self._tokenizers = tokenizers
        self._seed = seed
        self._on_error = on_error
        self._patience = {replica: Patience() for replica in drivers}
        self._limits = {name: limit_of(program) for name, program in programs.items()}
        self._params = {name: params_of(program) for name, program in programs.items()}
        self._running: dict[tuple[str, int], asyncio.Task[WorkerEvent]] = {}
        self._answers: dict[Sink, list[WorkerEvent]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hflow-episodes", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------- from other threads
    def open_groups(self, orders: Sequence[tuple[GroupOrder, Row]], sink: Sink) -> None:
        """Start the episodes of groups."""
        self._loop.call_soon_threadsafe(self._open, orders, sink)

    def view(self, orders: Sequence[ComputeOrder], sink: Sink) -> None:
        """Start episodes beside samples that exist, in streams that derive from theirs."""
        self._loop.call_soon_threadsafe(self._view, orders, sink)

    def cancel(self, stream: str, samples: Sequence[int]) -> None:
        """Stop what runs for released samples, and free what they left meanwhile."""
        self._loop.call_soon_threadsafe(self._cancel, stream, samples)

    def set_awake(self, replica: str, awake: bool) -> None:
        """Let the time limits on an engine run, or stand still."""
        patience = self._patience[replica]
        self._loop.call_soon_threadsafe(patience.run if awake else patience.stand)

    def close(self) -> None:
        """End the loop; what runs is never answered."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # -------------------------------------------------------------------------- on the loop
    def _open(self, orders: Sequence[tuple[GroupOrder, Row]], sink: Sink) -> None:
        for order, row in orders:
            program = self._programs[order.stream]
            inputs = {read.parameter: row[read.field][1] for read in program.reads}
            for sample in order.samples:
                self._start(Start(program, sample, order.group, inputs, row, order), sink)

    def _view(self, orders: Sequence[ComputeOrder], sink: Sink) -> None:
        for order in orders:
            program = self._programs[order.node]
            parent = self._plan.graph.stream(program.stream).parent
            assert parent is not None, f"{program.name} does not derive from a stream"
            held = self._store.gather_held(parent, read_fields(program, parent), order.samples)
            if held is None:
                self._answer(sink, Failed(order.node, order.key, "failed", RELEASED))
                continue
            (inputs,) = bind_rows(program, held, [1], "sample")
            self._start(Start(program, order.key, int(held.groups[0]), inputs, parent=parent), sink)

    def _start(self, start: Start, sink: Sink) -> None:
        name, sample = start.program.name, start.sample
        task = self._loop.create_task(self._attempts(start))
        self._running[name, sample] = task
        task.add_done_callback(partial(self._ended, name, sample, sink))

    def _ended(self, node: str, sample: int, sink: Sink, task: asyncio.Task[WorkerEvent]) -> None:
        del self._running[node, sample]
        if task.cancelled():
            self._answer(sink, Failed(node, sample, "failed", RELEASED))
        elif error := task.exception():
            self._on_error(error)
        else:
            self._answer(sink, task.result())

    def _answer(self, sink: Sink, event: WorkerEvent) -> None:
        """Report an event, together with all others of this turn of the loop."""
        if not self._answers:
            self._loop.call_soon(self._flush)
        self._answers.setdefault(sink, []).append(event)

    def _flush(self) -> None:
        answers, self._answers = self._answers, {}
        for sink, events in answers.items():
            sink(events)

    def _cancel(self, stream: str, samples: Sequence[int]) -> None:
        for sample in samples:
            if task := self._running.get((stream, sample)):
                task.cancel()
        self._store.release(samples, (stream,))

    async def _stop(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _attempts(self, start: Start) -> WorkerEvent:
        for tries_left in reversed(range(1 + start.program.options.get("retries", 0))):
            async with self._limits[start.program.name]:
                answer = await self._episode(start)
            if not (tries_left and isinstance(answer, Failed)):
                break
        return answer

    async def _episode(self, start: Start) -> WorkerEvent:
        program, sample = start.program, start.sample
        timeout = program.options.get("timeout")
        arguments = self._arguments(start)
        try:
            async with self._patience[self._replica[program.name]].limit(timeout) as clock:
                result = await program.body(**arguments)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, TimeoutError) and clock.expired():
                return Failed(program.name, sample, "timeout", too_long(timeout))
            self._drivers[self._replica[program.name]].check()
            if isinstance(error, DataError) and start.order is not None:
                raise bad_row(self._plan, start.order, error) from error
            if isinstance(error, HflowError) and not isinstance(error, BackendError | DataError):
                raise
            return Failed(program.name, sample, "failed", blame(error, program.body))
        made = self._openers[program.name].put(sample, start.group, result, start.row, start.parent)
        return made if start.order is not None else ComputeReady(program.name, sample)

    def _arguments(self, start: Start) -> dict[str, Any]:
        program, sample = start.program, start.sample
        arguments = {**program.knobs, **start.inputs}
        (model,) = program.models
        for name, kind in program.provided:
            if kind == "tokenizer":
                arguments[name] = self._tokenizers[model]
            elif kind.startswith("engine"):
                arguments[name] = self._engine(program, model, sample)
        return arguments

    def _engine(self, program: NodeProgram, model: str, sample: int) -> EpisodeEngine:
        return EpisodeEngine(
            self._drivers[self._replica[program.name]],
            self._tokenizers[model],
            self._params[program.name],
            sample_seed(self._seed, program.stream, sample, model),
        )
