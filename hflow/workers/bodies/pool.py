"""`Pool`: per-sample and per-group bodies in persistent processes that can be killed.

A body that raises, is killed or runs out of time fails its sample only, and is tried again up to
`retries` times. Synchronous bodies travel in chunks, so that messages cost little; asynchronous ones
share the event loop of one process. In both a job has neighbours, and what would make them wait, or
takes their process away, is not tried out on them again: what was lost with a process runs alone, in
processes that are started as they are needed, and so do all further jobs of a synchronous node that
was once so slow.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pebble import ProcessPool

from hflow.errors import RunError
from hflow.workers.bodies.pool_child import Job, JobId, JobResult, cancelled, install, is_async
from hflow.workers.bodies.pool_lanes import (
    MOST_PROCESSES,
    STAGGER_SECONDS,
    AsyncLane,
    FinishedCall,
    IsolatedLane,
    JobResults,
    PoolLane,
    SharedLane,
    SyncLane,
)
from hflow.workers.forkserver import CleanContext
from hflow.workers.pickling import ship


@dataclass(frozen=True)
class PoolBody:
    """A body and how it is run."""

    body: Callable[..., Any]
    timeout: float | None = None
    """Seconds for one attempt."""
    retries: int = 0
    """Further attempts after one that failed."""
    concurrency: int | None = None
    """Most samples that one worker runs at once; None: as many as there are processes (of slow bodies
    `alone.MOST_PROCESSES`), and `DEFAULT_CONCURRENCY` for asynchronous bodies."""


DEFAULT_CONCURRENCY = 64


class Pool:
    """Runs jobs and hands back their outcomes, from a thread of its own.

    Args:
        bodies: node name -> body.
        num_processes: processes for synchronous bodies; asynchronous ones have one more.
        on_outcomes: called with what finished together.
        on_error: called with an exception that the pool cannot go on from.
    """

    def __init__(
        self,
        bodies: Mapping[str, PoolBody],
        num_processes: int,
        on_outcomes: Callable[[Sequence[JobResult]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._bodies = bodies
        self._on_outcomes = on_outcomes
        self._on_error = on_error
        self._inbox: queue.SimpleQueue[Sequence[Job] | _Cancel | FinishedCall | None] = queue.SimpleQueue()
        self._attempts: dict[JobId, int] = {}
        """Of the jobs that have not ended."""
        self._unwanted: set[JobId] = set()
        awaited = {name for name, spec in bodies.items() if is_async(spec.body)}
        self._chunks = SyncLane(
            partial(self._start, set(bodies) - awaited, num_processes),
            num_processes,
            {name: spec.concurrency or num_processes for name, spec in bodies.items()},
            self._inbox.put,
        )
        self._steps = AsyncLane(
            partial(self._start, awaited, 1),
            {name: spec.concurrency or DEFAULT_CONCURRENCY for name, spec in bodies.items()},
            self._inbox.put,
        )
        self._alone = IsolatedLane(
            partial(self._start, set(bodies), 1),
            {name: spec.concurrency or MOST_PROCESSES for name, spec in bodies.items()},
            awaited,
            self._inbox.put,
        )
        shared: dict[str, SharedLane] = {n: self._steps if n in awaited else self._chunks for n in bodies}
        for lane in set(shared.values()):
            lane.start()
        self._lane_of: dict[str, PoolLane] = {**shared}
        self._thread = threading.Thread(target=self._serve, name="body-pool", daemon=True)
        self._thread.start()

    def _start(self, names: set[str], num_processes: int) -> ProcessPool:
        shipped = {name: self._shipped(name) for name in sorted(names)}
        return ProcessPool(num_processes, initializer=install, initargs=(shipped,), context=CleanContext())

    def _shipped(self, name: str) -> bytes:
        body = self._bodies[name].body
        try:
            return ship(body, [body])
        except RunError as error:
            raise RunError(f"node {name!r}: {error}") from error

    def submit(self, node: str, calls: Mapping[int, Mapping[str, Any]]) -> None:
        """Queue calls of a node's body: key -> keyword arguments."""
        timeout = self._bodies[node].timeout
        self._inbox.put([Job(node, key, arguments, timeout) for key, arguments in calls.items()])

    def cancel(self, names: Iterable[JobId]) -> None:
        """Give up calls (node, key), which end as failed; of those that ended already nothing is said."""
        self._inbox.put(_Cancel(tuple(names)))

    def close(self) -> None:
        """Kill what runs and end the processes; safe to call twice."""
        self._inbox.put(None)
        self._thread.join()
        for lane in (self._chunks, self._steps, self._alone):
            lane.close()

    # ------------------------------------------------------------------- the pool's thread
    def _serve(self) -> None:
        try:
            while self._take_all():
                for lane in (self._chunks, self._steps, self._alone):
                    lane.pump()
        except BaseException as error:  # noqa: BLE001 - whoever waits for outcomes raises it
            self._on_error(error)

    def _take_all(self) -> bool:
        """Wait for messages and take all there are; False: it is to end."""
        try:
            messages = [self._inbox.get(timeout=STAGGER_SECONDS if self._alone.is_starting else None)]
        except queue.Empty:
            return True
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        for message in messages:
            if message is None:
                return False
            self._take(message)
        return True

    def _take(self, message: Sequence[Job] | _Cancel | FinishedCall) -> None:
        match message:
            case FinishedCall():
                ended, lost = message.lane.settle(message)
                self._isolate(lost)
                self._finish(ended)
            case _Cancel(names):
                gone = [name for name in names if name in self._attempts]
                self._unwanted.update(gone)
                lanes = (self._chunks, self._steps, self._alone)
                self._finish([(job, cancelled(job)) for lane in lanes for job in lane.cancel(gone)])
            case _:
                for job in message:
                    self._attempts[job.name] = 0
                    self._lane_of[job.node].queue(job)

    def _isolate(self, lost: Sequence[Job]) -> None:
        """Jobs that were lost with a process that they shared run alone; so do others of a slow node."""
        for job in lost:
            self._alone.queue(job)
            if self._lane_of[job.node] is self._chunks:
                self._lane_of[job.node] = self._alone
        for node, lane in self._lane_of.items():
            if lane is self._alone:
                for job in self._chunks.take_out(node):
                    self._alone.queue(job)

    def _finish(self, ended: JobResults) -> None:
        """Try again what may be tried again; hand on the rest."""
        final = []
        for job, outcome in ended:
            tried, is_wanted = self._attempts[job.name], job.name not in self._unwanted
            if outcome.reason is not None and is_wanted and tried < self._bodies[job.node].retries:
                self._attempts[job.name] = tried + 1
                (self._alone if outcome.killed else self._lane_of[job.node]).queue(job)
            else:
                del self._attempts[job.name]
                self._unwanted.discard(job.name)
                final.append(outcome)
        if final:
            self._on_outcomes(final)


@dataclass(frozen=True)
class _Cancel:
    """Calls that nobody waits for any more."""

    names: tuple[JobId, ...]
