"""`EngineRecovery` replaces a worker that only generates, while the rest of the run continues.

Order of events: the worker fails, `EngineLost`, another process takes its place and restores its samples,
`EngineBack`. The executor then asks again for what the worker had not reported. Until then no group or body
is sent to it, and all other messages to it wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from hflow.base.errors import HflowError, RunError, WorkerFailureError
from hflow.data_plane.locations import DataLocations
from hflow.runtime.events import Asleep, Awake, EngineBack, EngineLost, Event, Published
from hflow.runtime.execution.run_context import RunContext
from hflow.runtime.records.trace import CONTROLLER
from hflow.runtime.state.run_state import RunState
from hflow.types.engine import SleepLevel
from hflow.workers.interface import Span

NOTICE_SECONDS = 5.0
"""Longest time from the moment when a call fails because its worker did, until `replace` is called."""


class EngineRecovery:
    """Replaces workers, up to `max_replacements` between two checkpoints.

    Attributes:
        away: workers that have failed, until the executor has asked again for what they had to do.
    """

    def __init__(
        self,
        run: RunContext,
        state: RunState,
        locations: Mapping[str, DataLocations],
        enqueue: Callable[[Event], None],
        max_replacements: int,
    ) -> None:
        self._run = run
        self._state = state
        self._locations = locations
        self._enqueue = enqueue
        self._max_replacements = max_replacements
        self._losses: dict[str, _Loss] = {}
        """Replica -> its last loss."""
        self._num_losses: Counter[str] = Counter()
        """Replica -> losses of which the state machine has learned."""
        self._num_in_progress = 0
        self._num_replacements = 0
        self._last_checkpoint: int | None = None
        """The newest when the last worker was replaced."""
        self.away: set[int] = set()
        self._is_settled = asyncio.Event()
        """Set while no worker is being replaced."""
        self._is_settled.set()
        self._is_over = False
        """Whether the run has come to its end, so that nothing needs to be generated any more."""

    async def finish(self) -> None:
        """Wait until no worker is being replaced, as messages may wait for it, at the end of the run."""
        self._is_over = True
        await self._is_settled.wait()

    def worker_of(self, replica: str) -> int:
        """Return the worker of a replica that was lost last."""
        return self._losses[replica].worker

    def failure(self, worker: int) -> str:
        """Return the failure of a worker that was replaced."""
        return str(self._losses[self._run.workers.replaceable[worker]].failure)

    async def replace(self, worker: int, failure: WorkerFailureError) -> None:
        """Replace a worker that has failed.

        Raises:
            WorkerFailureError: the failure, if the worker cannot be replaced.
        """
        replica = self._run.workers.replaceable.get(worker)
        if replica is None or not self._state.can_lose_engine(replica):
            raise failure
        if self._run.checkpoints.last != self._last_checkpoint:
            self._num_replacements, self._last_checkpoint = 0, self._run.checkpoints.last
        if self._num_replacements == self._max_replacements:
            raise failure
        self._num_replacements += 1
        self._num_in_progress += 1
        self._is_settled.clear()
        self.away.add(worker)
        self._losses[replica] = _Loss(worker, failure)
        self._enqueue(EngineLost(replica))
        self._run.observer.on_warning(
            f"{failure}; {replica} is started again while the run continues "
            f"({self._num_replacements} of {self._max_replacements})"
        )
        start = time.time()
        await asyncio.sleep(min(60.0, 0.25 * 2**self._num_replacements))
        try:
            await self._restore(worker)
            await self._pause_others(worker, replica)
        except HflowError as error:
            raise WorkerFailureError(f"{failure}; it could not be started again: {error}") from error
        self._enqueue(EngineBack(replica))
        self._num_in_progress -= 1
        if not self._num_in_progress:
            self._is_settled.set()
        span = Span(f"replace {replica}", "faults", start, time.time(), {"worker": worker})
        self._run.observer.on_span(CONTROLLER, span)

    async def _restore(self, worker: int) -> None:
        """Start a worker again, with the samples that it had.

        Raises:
            HflowError: when that is not possible.
        """
        restored = await self._run.workers.replace(worker)
        for stream, locations in self._locations.items():
            if lost := locations.at_home(worker) - set(restored.get(stream, ())):
                raise RunError(f"sample {min(lost)} of {stream} was lost with it")

    async def _pause_others(self, worker: int, replica: str) -> None:
        """Put the other engines of a replica to sleep, so that all of them get the next weights together.

        Where samples are not to be interrupted, they are finished first.
        """
        others = [w for w, name in self._run.workers.replaceable.items() if name == replica and w != worker]
        if not others:
            return
        while not self._run.plan.schedule.settings.interrupt and self._is_generating(others):
            await asyncio.sleep(0.1)
        await self._run.workers.sleep(replica, SleepLevel.PAUSE)

    def _is_generating(self, workers: Sequence[int]) -> bool:
        """Return whether samples are in flight on workers, and needed."""
        return not self._is_over and any(
            self._run.placer.is_at(worker, stream.name, group)
            for stream in self._run.plan.schedule.streams
            for group, _ in self._state.generating(stream.name)
            for worker in workers
        )

    def mark_lost(self, replica: str) -> None:
        """Forget what an engine was asked for and given, when the state machine learns of its loss.

        Raises:
            WorkerFailureError: why it was lost, if an evaluation has begun on it meanwhile.
        """
        if not self._state.can_lose_engine(replica):
            raise self._losses[replica].failure
        self._num_losses[replica] += 1
        self._run.workers.forget_weights(replica)

    def answer(self, replica: str, work: Awaitable[Sequence[Event]]) -> Awaitable[Sequence[Event]]:
        """Return the events that follow from an instruction to an engine, or from a publication for it.

        If the engine is lost from now on, whether this was done does not matter any more.
        """
        return self._answer(replica, self._num_losses[replica], work)

    async def _answer(
        self, replica: str, num_losses: int, work: Awaitable[Sequence[Event]]
    ) -> Sequence[Event]:
        events: Sequence[Event] = ()
        try:
            events = await work
        except RunError as error:
            if isinstance(error, WorkerFailureError) and replica in self._run.workers.replaceable.values():
                await self._noticed(replica, num_losses)
            if self._num_losses[replica] == num_losses:
                raise
        if self._num_losses[replica] == num_losses:
            return events
        return tuple(event for event in events if not isinstance(event, Awake | Asleep | Published))

    async def _noticed(self, replica: str, num_losses: int) -> None:
        """Wait a moment for the state machine to learn of a further loss."""
        deadline = time.monotonic() + NOTICE_SECONDS
        while self._num_losses[replica] == num_losses and time.monotonic() < deadline:
            await asyncio.sleep(0.1)


@dataclass(frozen=True)
class _Loss:
    worker: int
    failure: WorkerFailureError
