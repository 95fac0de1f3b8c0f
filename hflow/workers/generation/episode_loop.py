"""`EpisodeLoop`: runs all episodes of a worker on one event loop, in a thread of its own.

An episode starts from a dataset row or, in a stream that derives from another, from an existing sample.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from hflow.data.batches.row_arguments import bind_rows
from hflow.data.text.tokenizer import TextTokenizer
from hflow.engines.driver import EngineDriver
from hflow.environments.client import close_hosts
from hflow.episodes.endpoint.server import LOOPBACK, EndpointServer
from hflow.episodes.journal import Journal
from hflow.episodes.recorded_effects import RecordedEffects
from hflow.planner.plan.rows import Plan
from hflow.sandboxes.providers import Sandboxes
from hflow.types import EpisodeState
from hflow.workers.bodies.compute_runner import SAMPLE_RELEASED, EventSink, input_fields
from hflow.workers.generation.generate_runner import EpisodeStart, GenerateRunner
from hflow.workers.interface import ComputeTask, Failed, GroupTask, NodeProgram, WorkerEvent
from hflow.workers.storage.dataset_rows import DatasetRow, body_arguments
from hflow.workers.storage.sample_store import SampleStore

EpisodeId = tuple[str, int]
"""A generate node and a sample."""


class EpisodeLoop:
    """Runs an episode for every sample of a group, and reports each exactly once.

    A body that raises, or requests from an engine what it refuses, refuses its sample. Other errors of
    hflow end the run: a dataset row that the tokenizer cannot read, an engine that has failed.

    At most `num_processes` calls of one sandboxed tool run at the same time.
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
        endpoint_host: str = LOOPBACK,
    ) -> None:
        self._plan = plan
        self._server = EndpointServer(endpoint_host)
        self._runners = {
            name: GenerateRunner(plan, program, store, drivers, tokenizers, seed, self._server)
            for name, program in programs.items()
        }
        self._store = store
        self._on_error = on_error
        self._awake: set[str] = set()
        """Generation replicas whose engine is awake."""
        self._running: dict[EpisodeId, asyncio.Task[WorkerEvent]] = {}
        self._starts: dict[EpisodeId, EpisodeStart] = {}
        self._effects: dict[EpisodeId, RecordedEffects] = {}
        """The effects of the current attempt of each episode."""
        self._detached: set[EpisodeId] = set()
        """Episodes that another worker continues, so that this one does not report them."""
        self._state_counts: Counter[EpisodeState] = Counter()
        self._sandboxes = Sandboxes(num_processes)
        self._unsent: dict[EventSink, list[WorkerEvent]] = {}
        """Events of this iteration of the event loop."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hflow-episodes", daemon=True)
        self._thread.start()

    # For other threads

    def open_groups(
        self,
        tasks: Sequence[tuple[GroupTask, DatasetRow]],
        sink: EventSink,
        journals: Mapping[int, Journal] | None = None,
    ) -> None:
        """Start the episodes of groups, some with a journal; a sink receives the events of their samples."""
        self._loop.call_soon_threadsafe(self._open, tasks, sink, journals or {})

    def derive(self, tasks: Sequence[ComputeTask], sink: EventSink) -> None:
        """Start episodes from existing samples, in streams that derive from theirs."""
        self._loop.call_soon_threadsafe(self._derive, tasks, sink)

    def cancel(self, stream: str, samples: Sequence[int]) -> None:
        """Stop the episodes of released samples, and free what they have stored meanwhile."""
        self._loop.call_soon_threadsafe(self._cancel, stream, samples)

    def set_awake(self, replica: str, awake: bool) -> None:
        """Let the timeouts of the episodes that use an engine run, or pause them."""
        self._loop.call_soon_threadsafe(self._set_awake, replica, awake)

    def journals(self, node: str, samples: Sequence[int]) -> dict[int, Journal]:
        """Return the journals of those samples whose episodes are unfinished here.

        Completions have the tokens of their last interruption. Of an episode that has not begun, it is the
        journal with which it will.
        """

        async def collect() -> dict[int, Journal]:
            return self._journals_of(node, [sample for sample in samples if (node, sample) in self._starts])

        return asyncio.run_coroutine_threadsafe(collect(), self._loop).result()

    def detach_groups(self, node: str, groups: Sequence[int]) -> list[GroupTask]:
        """Stop the episodes of groups without reporting them, so that another worker can continue them.

        Interrupt the engines first, as for `journals`. Groups of which an episode has ended are left running.

        Returns:
            The tasks of the stopped groups, with the journals of their samples.
        """

        async def stop() -> list[GroupTask]:
            tasks = self._tasks_all_running(node, set(groups))
            episodes = [(node, sample) for task in tasks for sample in task.samples]
            stopped = [self._running[episode] for episode in episodes]
            self._detached.update(episodes)
            detached = [replace(task, journals=self._journals_of(node, task.samples)) for task in tasks]
            for episode in stopped:
                episode.cancel()
            await asyncio.gather(*stopped, return_exceptions=True)
            return detached

        return asyncio.run_coroutine_threadsafe(stop(), self._loop).result()

    def state_counts(self) -> dict[EpisodeState, int]:
        """Return the number of episodes in each state; TERMINATED counts all that ever ended."""
        return {state: self._state_counts[state] for state in EpisodeState}

    def close(self) -> None:
        """Stop all episodes without reporting them, and end the thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._sandboxes.close()
            close_hosts()

    # On the event loop

    def _open(
        self,
        tasks: Sequence[tuple[GroupTask, DatasetRow]],
        sink: EventSink,
        journals: Mapping[int, Journal],
    ) -> None:
        for task, row in tasks:
            program = self._runners[self._plan.graph.stream(task.stream).source].program
            inputs = body_arguments(program, row)
            for sample in task.samples:
                journal = journals.get(sample)
                start = EpisodeStart(program, sample, task.group, inputs, row, task, journal=journal)
                self._start(start, sink)

    def _derive(self, tasks: Sequence[ComputeTask], sink: EventSink) -> None:
        for task in tasks:
            program = self._runners[task.node].program
            parent = self._plan.graph.stream(program.stream).parent
            assert parent is not None, f"{program.name} does not derive from a stream"
            batch = self._store.gather_if_present(parent, input_fields(program, parent), task.samples)
            if batch is None:
                self._report(sink, Failed(task.node, task.key, "failed", SAMPLE_RELEASED))
                continue
            (inputs,) = bind_rows(program, batch, [1], "sample")
            start = EpisodeStart(program, task.key, int(batch.groups[0]), inputs, parent=parent)
            self._start(start, sink)

    def _start(self, start: EpisodeStart, sink: EventSink) -> None:
        episode = start.program.name, start.sample
        body = self._loop.create_task(self._run_attempts(start))
        self._running[episode] = body
        self._starts[episode] = start
        body.add_done_callback(partial(self._finish, episode, sink))

    async def _run_attempts(self, start: EpisodeStart) -> WorkerEvent:
        """Run an episode up to `1 + retries` times.

        A further attempt replays the journal of the one before, so that nothing is done twice.
        """
        journal = start.journal
        for retries_left in reversed(range(1 + start.program.options.get("retries", 0))):
            effects = RecordedEffects(self._sandboxes, self._state_counts, journal)
            event = await self._run_attempt(start, effects)
            if not (retries_left and isinstance(event, Failed)):
                break
            journal = None if effects.has_diverged else effects.journal
        return event

    async def _run_attempt(self, start: EpisodeStart, effects: RecordedEffects) -> WorkerEvent:
        self._effects[start.program.name, start.sample] = effects
        try:
            runner = self._runners[start.program.name]
            async with runner.concurrency_limit:
                effects.status.begin()
                return await runner.run(start, effects)
        finally:
            effects.status.end()
            del self._effects[start.program.name, start.sample]

    def _finish(self, episode: EpisodeId, sink: EventSink, body: asyncio.Task[WorkerEvent]) -> None:
        del self._running[episode], self._starts[episode]
        if episode in self._detached:
            self._detached.remove(episode)
        elif body.cancelled():
            self._report(sink, Failed(*episode, "failed", SAMPLE_RELEASED))
        elif error := body.exception():
            self._on_error(error)
        else:
            self._report(sink, body.result())

    def _report(self, sink: EventSink, event: WorkerEvent) -> None:
        """Report an event, together with all others of this iteration of the event loop."""
        if not self._unsent:
            self._loop.call_soon(self._send_events)
        self._unsent.setdefault(sink, []).append(event)

    def _send_events(self) -> None:
        unsent, self._unsent = self._unsent, {}
        for sink, events in unsent.items():
            sink(events)

    def _cancel(self, stream: str, samples: Sequence[int]) -> None:
        source = self._plan.graph.stream(stream).source
        for sample in samples:
            if episode := self._running.get((source, sample)):
                episode.cancel()
        self._store.release(samples, (stream,))

    def _set_awake(self, replica: str, awake: bool) -> None:
        """Run the clock of each node while all of its engines are awake."""
        (self._awake.add if awake else self._awake.discard)(replica)
        for runner in self._runners.values():
            replicas = runner.replicas.values()
            if replica in replicas:
                (runner.clock.run if self._awake.issuperset(replicas) else runner.clock.pause)()

    def _tasks_all_running(self, node: str, groups: set[int]) -> list[GroupTask]:
        """Return the tasks of those groups of which no episode has ended."""
        tasks = {
            start.task.group: start.task
            for (name, _), start in self._starts.items()
            if name == node and start.task is not None and start.task.group in groups
        }
        running = {episode for episode, body in self._running.items() if not body.done()}
        return [task for task in tasks.values() if running.issuperset((node, n) for n in task.samples)]

    def _journals_of(self, node: str, samples: Sequence[int]) -> dict[int, Journal]:
        """Return the journals of samples; for one that has not begun, the journal it was to start with."""
        empty = Journal()
        return {
            sample: self._effects[node, sample].journal
            if (node, sample) in self._effects
            else self._starts[node, sample].journal or empty
            for sample in samples
        }

    async def _stop(self) -> None:
        running = list(self._running.values())
        for episode in running:
            episode.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._server.close()
