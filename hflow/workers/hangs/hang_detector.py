"""`HangDetector` finds the rank that keeps the others of a call waiting, and words the error.

The message says which rank is missing and where it is, which ranks wait for it, and in what.

A collective with a missing rank fails on the ranks that wait (gloo) or ends their processes (NCCL). Only the
missing rank knows why, so hflow samples the stack of every worker when a call fails. As a process that was
ended cannot be sampled any more, all workers are also sampled whenever the timeout passes without an error.
A long node does not end because of time alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.base.errors import RunError, WorkerFailureError
from hflow.base.text import format_ranges
from hflow.planner.plan.rows import Replica
from hflow.workers.hangs.stack_probe import CollectiveError, LostPeerError, StackSnapshot

Snapshots = Mapping[int, StackSnapshot | None]
"""Worker -> where its device thread is; None: its process does not respond."""


@dataclass(frozen=True)
class WorkerCall:
    """Something that several workers do together on their devices."""

    activity: str
    """What the worker does, as in `running node 'actor_train', step 3`."""
    workers: tuple[int, ...]
    """All that take part."""
    replica: Replica | None = None
    """The replica that they are the ranks of, if it is one."""

    def describe(self, worker: int) -> str:
        """Return a worker with its rank."""
        if self.replica is None or worker not in self.replica.workers:
            return f"worker {worker}"
        return f"worker {worker} (rank {self.replica.workers.index(worker)} of {self.replica.name})"


def waiting_workers(snapshots: Snapshots) -> list[int]:
    """Return the workers that wait for others.

    These are the workers whose thread is in a collective. If none is, because collectives are asynchronous,
    they are the workers that have issued more collectives than another member of the same group.
    """
    known = {worker: snapshot for worker, snapshot in snapshots.items() if snapshot is not None}
    blocked = [worker for worker, snapshot in known.items() if snapshot.collective]
    if blocked:
        return blocked
    all_counts = [snapshot.collective_counts for snapshot in known.values()]
    return [
        worker
        for worker, snapshot in known.items()
        if any(_is_ahead(snapshot.collective_counts, counts) for counts in all_counts)
    ]


def _is_ahead(counts: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return any(count > other.get(group, count) for group, count in counts.items())


def hang_message(call: WorkerCall, timeout: float, snapshots: Snapshots) -> str:
    """Return the error message of a call on which workers waited `timeout` seconds, in one line."""
    waiting = waiting_workers(snapshots)
    missing = [worker for worker in snapshots if worker not in waiting]
    limit = f"{timeout:g} s"
    if not missing:
        places = "; ".join(f"{call.describe(w)} {_location(call, snapshots[w])}" for w in waiting)
        return f"{call.activity}: no progress for {limit}, because every rank waits for another: {places}"
    first, *rest = missing
    parts = [f"{call.describe(first)} did not join within {limit}: it {_location(call, snapshots[first])}"]
    parts += [
        f"{call.describe(worker)} did not join either: it {_location(call, snapshots[worker])}"
        for worker in rest
    ]
    parts += _waits(waiting, snapshots, "it" if len(missing) == 1 else "them")
    return f"{call.activity}: {'; '.join(parts)}"


def describe_locations(call: WorkerCall, snapshots: Snapshots) -> list[str]:
    """Return a phrase for each worker that says where it is."""
    return [f"{call.describe(worker)} {_location(call, snapshot)}" for worker, snapshot in snapshots.items()]


def _waits(waiting: Sequence[int], snapshots: Snapshots, missing: str) -> list[str]:
    """Return a phrase for each collective that workers wait in."""
    by_collective: dict[str, list[int]] = defaultdict(list)
    for worker in waiting:
        snapshot = snapshots[worker]
        by_collective[snapshot.collective if snapshot is not None else ""].append(worker)
    phrases = []
    for collective, workers in by_collective.items():
        subject = "workers {} wait" if len(workers) > 1 else "worker {} waits"
        place = f"in {collective}" if collective else "in a collective that it has not issued"
        phrases.append(f"{subject.format(format_ranges(workers))} for {missing} {place}")
    return phrases


def _location(call: WorkerCall, snapshot: StackSnapshot | None) -> str:
    """Return a worker's place, as in `is in score (file:line)`."""
    if snapshot is None:
        return "does not respond, because its process is stopped or its interpreter is blocked"
    if not snapshot.activity:
        return "is idle, because it was not called or has finished"
    if snapshot.collective:
        return f"waits in {snapshot.collective} at {snapshot.location}"
    still = "" if snapshot.activity == call.activity else f"still {snapshot.activity}, "
    return f"is {still}in {snapshot.location}"


GRACE_SECONDS = 1.0
"""How long a collective's failure waits for the error that caused it."""


class WorkerDiedError(WorkerFailureError):
    """A worker's process ended."""


class HangDetector:
    """Collects the answers of one call, and fails a collective with a missing rank after `timeout` seconds.

    `probe` samples a worker: None if it does not respond; it raises `WorkerDiedError`.
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
