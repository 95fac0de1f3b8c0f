"""Waits for the answers of workers that act together, and finds the rank that keeps the others waiting.

A collective with a missing rank fails on the ranks that wait (gloo) or ends their processes (NCCL). Only the
missing rank knows why, so hflow samples the stack of every worker when a call fails. As a process that was
ended cannot be sampled any more, all workers are also sampled whenever the timeout passes without an error.
A long node does not end because of time alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from hflow.base.errors import RunError, WorkerFailureError
from hflow.workers.hangs.hang_report import (
    Snapshots,
    WorkerCall,
    describe_locations,
    hang_message,
    waiting_workers,
)
from hflow.workers.hangs.stack_probe import CollectiveError, LostPeerError, StackSnapshot

GRACE_SECONDS = 1.0
"""How long a collective's failure waits for the error that caused it."""


class WorkerDiedError(WorkerFailureError):
    """A worker's process ended."""


class HangDetector:
    """Collects the answers of one call.

    Args:
        call: what the workers do.
        probe: samples a worker; None: it does not respond. Raises `WorkerDiedError`.
        timeout: seconds after which a collective with a missing rank fails.
    """

    def __init__(
        self, call: WorkerCall, probe: Callable[[int], Awaitable[StackSnapshot | None]], timeout: float
    ) -> None:
        self._call = call
        self._probe = probe
        self._timeout = timeout
        self._start = time.monotonic()
        self._tasks: dict[int, asyncio.Future[Any]] = {}
        self._last_snapshots: dict[int, StackSnapshot | None] = {}
        """Worker -> its snapshot when the timeout last passed."""
        self._dead: dict[int, WorkerDiedError] = {}
        """Workers that were found dead when they were sampled."""

    async def collect(self, answers: Mapping[int, Awaitable[Any]]) -> list[Any]:
        """Return the answers, in the order of the mapping.

        Raises:
            RunError: the error that explains the others; of a collective, it names the missing rank.
        """
        self._tasks = {worker: asyncio.ensure_future(answer) for worker, answer in answers.items()}
        try:
            pending = set(self._tasks.values())
            while pending:
                _, pending = await asyncio.wait(
                    pending, timeout=self._timeout, return_when=asyncio.FIRST_EXCEPTION
                )
                if self._errors():
                    await self._raise_cause()
                elif pending:
                    await self._sample_all()
            return [task.result() for task in self._tasks.values()]
        finally:
            self._errors()  # marks them as retrieved, so that asyncio does not log them
            for task in self._tasks.values():
                task.cancel()

    def _errors(self) -> dict[int, BaseException]:
        done = {worker: task for worker, task in self._tasks.items() if task.done()}
        errors = {worker: task.exception() for worker, task in done.items()}
        return {worker: error for worker, error in errors.items() if error is not None}

    async def _sample_all(self) -> None:
        """Sample all workers.

        Raises:
            RunError: when a worker does not respond for the second time.
        """
        previous, new = self._last_snapshots, await self._sample(self._call.workers)
        self._last_snapshots = {**previous, **new}
        is_silent = [
            snapshot is None and worker in previous and previous[worker] is None
            for worker, snapshot in new.items()
        ]
        if any(is_silent):
            waiting = waiting_workers(self._last_snapshots)
            relevant = {
                worker: snapshot
                for worker, snapshot in self._last_snapshots.items()
                if snapshot is None or worker in waiting
            }
            raise WorkerFailureError(hang_message(self._call, self._timeout, relevant))

    async def _raise_cause(self) -> None:
        """Raise the error that explains the others."""
        is_late = time.monotonic() - self._start >= self._timeout
        if not self._original_errors() and not is_late:
            await asyncio.wait(self._tasks.values(), timeout=GRACE_SECONDS)
        snapshots = {} if self._original_errors() else await self._snapshots_after_failure()
        for error in self._original_errors():
            raise error
        deaths = self._deaths()
        alive = {worker: snapshot for worker, snapshot in snapshots.items() if worker not in deaths}
        missing = [worker for worker in alive if worker not in waiting_workers(snapshots)]
        lost = [error for error in self._errors().values() if isinstance(error, LostPeerError)]
        if deaths and not (is_late and missing and self._died_waiting(deaths, snapshots)):
            locations = describe_locations(self._call, alive) if is_late else []
            raise WorkerDiedError("; ".join([str(next(iter(deaths.values()))), *locations]))
        if lost and not (is_late and missing):  # the process that ended is not known yet
            raise lost[0]
        if is_late:
            is_silent = any(alive[worker] is None for worker in missing)
            kind = WorkerFailureError if is_silent else RunError
            raise kind(hang_message(self._call, self._timeout, snapshots))
        raise next(iter(self._errors().values()))

    def _deaths(self) -> dict[int, WorkerDiedError]:
        """Return the workers whose processes ended."""
        errors = self._errors().items()
        return {**self._dead, **{w: error for w, error in errors if isinstance(error, WorkerDiedError)}}

    def _died_waiting(self, dead: Iterable[int], snapshots: Snapshots) -> bool:
        """Return whether a dead worker was waiting when last sampled, and no other has progressed since."""
        alive = {worker: snapshot for worker, snapshot in snapshots.items() if worker not in dead}
        is_stuck = all(
            snapshot is not None and last is not None and snapshot.collective_counts == last.collective_counts
            for worker, snapshot in alive.items()
            for last in [self._last_snapshots.get(worker)]
        )
        return is_stuck and not set(dead).isdisjoint(waiting_workers(snapshots))

    def _original_errors(self) -> list[BaseException]:
        """Return the errors that do not follow from what happened to another worker."""
        consequences = (CollectiveError, WorkerDiedError)
        return [error for error in self._errors().values() if not isinstance(error, consequences)]

    async def _snapshots_after_failure(self) -> dict[int, StackSnapshot | None]:
        """Sample all workers; of failed ones, return where they failed, of dead ones, the last snapshot."""
        failed = self._errors()
        snapshots = await self._sample(worker for worker in self._call.workers if worker not in failed)
        idle = [worker for worker, snapshot in snapshots.items() if _is_idle(snapshot)]
        if answering := [self._tasks[worker] for worker in idle if worker in self._tasks]:
            await asyncio.wait(answering, timeout=GRACE_SECONDS)
        for worker, error in self._errors().items():
            if isinstance(error, CollectiveError):
                snapshots[worker] = error.snapshot
        last = {w: self._last_snapshots[w] for w in self._deaths() if w in self._last_snapshots}
        return dict(sorted({**snapshots, **last}.items()))

    async def _sample(self, workers: Iterable[int]) -> dict[int, StackSnapshot | None]:
        """Sample workers; those that turn out to be dead are noted and left out."""
        sampled = list(workers)
        results = await asyncio.gather(*map(self._probe, sampled), return_exceptions=True)
        snapshots: dict[int, StackSnapshot | None] = {}
        for worker, result in zip(sampled, results, strict=True):
            if isinstance(result, WorkerDiedError):
                self._dead[worker] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                snapshots[worker] = result
        return snapshots


def _is_idle(snapshot: StackSnapshot | None) -> bool:
    return snapshot is not None and not snapshot.activity
