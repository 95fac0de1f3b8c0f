"""`EpisodeLoop`: generate bodies, all on one event loop in a thread beside the engines.

A sample starts from a row of the dataset; that of a derived stream, beside a sample that exists.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from hflow.data.row_arguments import bind_rows
from hflow.data.tokenizer import TextTokenizer
from hflow.planner.ir import Plan
from hflow.types import EpisodeState
from hflow.workers.bodies.compute_runner import SAMPLE_RELEASED, EventSink, input_fields
from hflow.workers.generation.engine_driver import EngineDriver
from hflow.workers.generation.generate_runner import EpisodeStart, GenerateRunner
from hflow.workers.generation.journal import Journal
from hflow.workers.generation.recorded_effects import RecordedEffects
from hflow.workers.generation.sandboxes import Sandboxes
from hflow.workers.interface import ComputeOrder, Failed, GroupOrder, NodeProgram, WorkerEvent
from hflow.workers.storage.dataset_rows import DatasetRow
from hflow.workers.storage.sample_store import SampleStore


class EpisodeLoop:
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
        num_processes: calls of one sandboxed tool that run at once.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Mapping[str, NodeProgram],
        store: SampleStore,
        drivers: Mapping[str, EngineDriver],
        tokenizers: Mapping[str, TextTokenizer],
        seed: int,
        on_error: Callable[[BaseException], None],
        num_processes: int = 1,
    ) -> None:
        self._plan = plan
        self._stages = {
            name: GenerateRunner(plan, program, store, drivers, tokenizers, seed)
            for name, program in programs.items()
        }
        self._store = store
        self._on_error = on_error
        self._awake: set[str] = set()
        self._running: dict[tuple[str, int], asyncio.Task[WorkerEvent]] = {}
        self._effects: dict[tuple[str, int], RecordedEffects] = {}
        """Of the running, by node and sample."""
        self._starts: dict[tuple[str, int], EpisodeStart] = {}
        self._given_up: set[tuple[str, int]] = set()
        """Stopped, as another worker goes on with them: they are not answered here."""
        self._census: Counter[EpisodeState] = Counter()
        self._sandboxes = Sandboxes(num_processes)
        self._answers: dict[EventSink, list[WorkerEvent]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hflow-episodes", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------- from other threads
    def open_groups(
        self,
        orders: Sequence[tuple[GroupOrder, DatasetRow]],
        sink: EventSink,
        journals: Mapping[int, Journal] | None = None,
    ) -> None:
        """Start the episodes of groups; samples of which there is a journal go on from where it ends."""
        self._loop.call_soon_threadsafe(self._open, orders, sink, journals or {})

    def derive(self, orders: Sequence[ComputeOrder], sink: EventSink) -> None:
        """Start episodes beside samples that exist, in streams that derive from theirs."""
        self._loop.call_soon_threadsafe(self._derive, orders, sink)

    def cancel(self, stream: str, samples: Sequence[int]) -> None:
        """Stop what runs for released samples, and free what they left meanwhile."""
        self._loop.call_soon_threadsafe(self._cancel, stream, samples)

    def set_awake(self, replica: str, awake: bool) -> None:
        """Let the time limits on an engine run, or stand still."""
        self._loop.call_soon_threadsafe(self._set_awake, replica, awake)

    def journals(self) -> dict[tuple[str, int], Journal]:
        """What every unfinished sample did so far, by node and sample.

        Completions have the tokens of their last interruption: interrupt the engines first.
        """

        async def collect() -> dict[tuple[str, int], Journal]:
            return {key: effects.journal for key, effects in self._effects.items()}

        return asyncio.run_coroutine_threadsafe(collect(), self._loop).result()

    def detach_groups(self, node: str, groups: Sequence[int]) -> list[GroupOrder]:
        """Stop the episodes of groups whose samples all run, without an answer.

        Returns the orders of these groups, with the journals of their samples. As for `journals`, the engines
        must have been interrupted.
        """

        async def stop() -> list[GroupOrder]:
            orders = self._all_running(node, set(groups))
            tasks = [self._running[node, sample] for order in orders for sample in order.samples]
            self._given_up |= {(node, sample) for order in orders for sample in order.samples}
            left = [replace(order, journals=self._journals_of(node, order.samples)) for order in orders]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return left

        return asyncio.run_coroutine_threadsafe(stop(), self._loop).result()

    def states(self) -> dict[EpisodeState, int]:
        """How many episodes are in each state; the terminated are all that ever ended."""
        return {state: self._census[state] for state in EpisodeState}

    def close(self) -> None:
        """End the loop; what runs is never answered."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._sandboxes.close()

    # -------------------------------------------------------------------------- on the loop
    def _set_awake(self, replica: str, awake: bool) -> None:
        """An episode's time runs while all of its engines are awake."""
        (self._awake.add if awake else self._awake.discard)(replica)
        for stage in self._stages.values():
            replicas = stage.replicas.values()
            if replica in replicas:
                (stage.clock.run if self._awake.issuperset(replicas) else stage.clock.pause)()

    def _open(
        self,
        orders: Sequence[tuple[GroupOrder, DatasetRow]],
        sink: EventSink,
        journals: Mapping[int, Journal],
    ) -> None:
        for order, row in orders:
            program = self._stages[self._plan.graph.stream(order.stream).source].program
            inputs = {read.parameter: row[read.field][1] for read in program.reads}
            for sample in order.samples:
                journal = journals.get(sample)
                self._start(
                    EpisodeStart(program, sample, order.group, inputs, row, order, journal=journal), sink
                )

    def _derive(self, orders: Sequence[ComputeOrder], sink: EventSink) -> None:
        for order in orders:
            program = self._stages[order.node].program
            parent = self._plan.graph.stream(program.stream).parent
            assert parent is not None, f"{program.name} does not derive from a stream"
            held = self._store.gather_if_present(parent, input_fields(program, parent), order.samples)
            if held is None:
                self._answer(sink, Failed(order.node, order.key, "failed", SAMPLE_RELEASED))
                continue
            (inputs,) = bind_rows(program, held, [1], "sample")
            self._start(EpisodeStart(program, order.key, int(held.groups[0]), inputs, parent=parent), sink)

    def _start(self, start: EpisodeStart, sink: EventSink) -> None:
        name, sample = start.program.name, start.sample
        task = self._loop.create_task(self._attempts(start))
        self._running[name, sample] = task
        self._starts[name, sample] = start
        task.add_done_callback(partial(self._ended, name, sample, sink))

    def _ended(self, node: str, sample: int, sink: EventSink, task: asyncio.Task[WorkerEvent]) -> None:
        del self._running[node, sample], self._starts[node, sample]
        if (node, sample) in self._given_up:
            self._given_up.remove((node, sample))
        elif task.cancelled():
            self._answer(sink, Failed(node, sample, "failed", SAMPLE_RELEASED))
        elif error := task.exception():
            self._on_error(error)
        else:
            self._answer(sink, task.result())

    def _answer(self, sink: EventSink, event: WorkerEvent) -> None:
        """Report an event, together with all others of this turn of the loop."""
        if not self._answers:
            self._loop.call_soon(self._flush)
        self._answers.setdefault(sink, []).append(event)

    def _flush(self) -> None:
        answers, self._answers = self._answers, {}
        for sink, events in answers.items():
            sink(events)

    def _cancel(self, stream: str, samples: Sequence[int]) -> None:
        source = self._plan.graph.stream(stream).source
        for sample in samples:
            if task := self._running.get((source, sample)):
                task.cancel()
        self._store.release(samples, (stream,))

    def _all_running(self, node: str, groups: set[int]) -> list[GroupOrder]:
        """The orders of those groups of which no sample has ended."""
        orders = {
            start.order.group: start.order
            for (name, _), start in self._starts.items()
            if name == node and start.order is not None and start.order.group in groups
        }
        running = {key for key, task in self._running.items() if not task.done()}
        return [o for o in orders.values() if running.issuperset((node, sample) for sample in o.samples)]

    def _journals_of(self, node: str, samples: Sequence[int]) -> dict[int, Journal]:
        """What samples did so far; one that has not begun has what it was to start from."""
        empty = Journal()
        return {
            s: self._effects[node, s].journal
            if (node, s) in self._effects
            else self._starts[node, s].journal or empty
            for s in samples
        }

    async def _stop(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _attempts(self, start: EpisodeStart) -> WorkerEvent:
        """Try until it ends well. A try goes on from what the one before did: nothing is done twice."""
        journal = start.journal
        for tries_left in reversed(range(1 + start.program.options.get("retries", 0))):
            effects = RecordedEffects(self._sandboxes, self._census, journal)
            answer = await self._attempt(start, effects)
            if not (tries_left and isinstance(answer, Failed)):
                break
            journal = None if effects.has_diverged else effects.journal
        return answer

    async def _attempt(self, start: EpisodeStart, effects: RecordedEffects) -> WorkerEvent:
        self._effects[start.program.name, start.sample] = effects
        try:
            stage = self._stages[start.program.name]
            async with stage.limit:
                effects.watch.begin()
                return await stage.play(start, effects)
        finally:
            effects.watch.end()
            del self._effects[start.program.name, start.sample]
