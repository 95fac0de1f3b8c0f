"""`Pool`: per-sample and per-group bodies in persistent processes that can be killed.

Two lanes share the rules: a body that raises, is killed or runs out of time fails its sample
only, and is tried again up to `retries` times. Synchronous bodies travel in chunks, so that
messages cost little; a chunk that is killed is run again one by one, so that exactly the guilty
sample is refused. Asynchronous bodies share the event loop of one process.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pebble import ProcessPool

from hflow.errors import RunError
from hflow.workers.chunks import ChunkLane
from hflow.workers.lane import Lane, Return
from hflow.workers.pool_child import Job, Outcome, install, is_async
from hflow.workers.processes import CleanContext
from hflow.workers.ship import ship
from hflow.workers.steps import StepLane


@dataclass(frozen=True)
class PoolBody:
    """A body and how it is run."""

    body: Callable[..., Any]
    timeout: float | None = None
    """Seconds for one attempt."""
    retries: int = 0
    """Further attempts after one that failed."""
    concurrency: int | None = None
    """Most samples that one worker runs at once; None: as many as there are processes, and
    `DEFAULT_CONCURRENCY` for asynchronous bodies."""


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
        on_outcomes: Callable[[Sequence[Outcome]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._bodies = bodies
        self._on_outcomes = on_outcomes
        self._on_error = on_error
        self._inbox: queue.SimpleQueue[Sequence[Job] | Return | None] = queue.SimpleQueue()
        self._attempts: dict[tuple[str, int], int] = {}
        awaited = {name for name, spec in bodies.items() if is_async(spec.body)}
        self._chunks = ChunkLane(
            partial(self._start, set(bodies) - awaited, num_processes),
            num_processes,
            {name: spec.concurrency or num_processes for name, spec in bodies.items()},
            self._inbox.put,
        )
        self._steps = StepLane(
            partial(self._start, awaited, 1),
            {name: spec.concurrency or DEFAULT_CONCURRENCY for name, spec in bodies.items()},
            self._inbox.put,
        )
        self._lanes: dict[str, Lane] = {
            name: self._steps if name in awaited else self._chunks for name in bodies
        }
        for lane in set(self._lanes.values()):
            lane.start()
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

    def close(self) -> None:
        """Kill what runs and end the processes; safe to call twice."""
        self._inbox.put(None)
        self._thread.join()
        self._chunks.close()
        self._steps.close()

    # ------------------------------------------------------------------- the pool's thread
    def _serve(self) -> None:
        try:
            while (message := self._inbox.get()) is not None:
                self._take(message)
                while not self._inbox.empty():
                    if (message := self._inbox.get()) is None:
                        return
                    self._take(message)
                self._chunks.pump()
                self._steps.pump()
        except BaseException as error:  # noqa: BLE001 - whoever waits for outcomes raises it
            self._on_error(error)

    def _take(self, message: Sequence[Job] | Return) -> None:
        if isinstance(message, Return):
            self._finish(message.lane.settle(message))
            return
        for job in message:
            self._lanes[job.node].queue(job)

    def _finish(self, settled: Sequence[tuple[Job, Outcome]]) -> None:
        """Try again what may be tried again; hand on the rest."""
        final = []
        for job, outcome in settled:
            name = (job.node, job.key)
            tried = self._attempts.get(name, 0)
            if outcome.reason is not None and tried < self._bodies[job.node].retries:
                self._attempts[name] = tried + 1
                lane = self._lanes[job.node]
                (lane.queue_alone if outcome.killed else lane.queue)(job)
            else:
                self._attempts.pop(name, None)
                final.append(outcome)
        if final:
            self._on_outcomes(final)
