"""The lane of asynchronous bodies: one process, one loop, advanced in short steps.

Each step hands new jobs to the loop and brings back those that finished; the others stay in the
loop. A body that blocks the loop is killed with its process, and all that ran there run again,
one at a time, so that exactly the guilty one is refused.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

from pebble import ProcessPool

from hflow.workers.lane import Lane, Return
from hflow.workers.pool_child import ASYNC_STEP_SECONDS, Job, Outcome, run_async

GRACE_SECONDS = 1.0
"""A loop that does not come back for the longest timeout and this long is blocked."""


class StepLane(Lane):
    """At most one step is under way."""

    def __init__(
        self,
        start: Callable[[], ProcessPool],
        concurrency: Mapping[str, int],
        on_return: Callable[[Return], None],
    ) -> None:
        super().__init__(start, on_return)
        self._concurrency = concurrency
        self._waiting: deque[Job] = deque()
        self._running: dict[tuple[str, int], Job] = {}
        self._stepping = False

    def queue(self, job: Job) -> None:
        """Take a job behind the others."""
        self._waiting.append(job)

    def pump(self) -> None:
        """Make the next step, if none is under way and there is anything to run."""
        if self._stepping:
            return
        new = self._admit()
        self._running.update(((job.node, job.key), job) for job in new)
        if self._running:
            self._stepping = True
            self._call(new, self._limit(), run_async)

    def settle(self, returned: Return) -> list[tuple[Job, Outcome]]:
        """Outcomes of the jobs that finished; all that was lost with a process is suspect."""
        self._stepping = False
        outcomes = returned.outcomes()
        if outcomes is not None:
            return [(self._running.pop((outcome.node, outcome.key)), outcome) for outcome in outcomes]
        lost = list(self._running.values())
        self._running.clear()
        if len(lost) == 1:
            return [(lost[0], returned.blame(lost[0]))]
        self._suspects.extend(lost)
        return []

    def _admit(self) -> list[Job]:
        """Jobs that may start now: one suspect alone, or as many as their nodes allow."""
        if self._suspects:
            return [] if self._running else [self._suspects.popleft()]
        running = Counter(node for node, _ in self._running)
        admitted, kept = [], deque[Job]()
        for job in self._waiting:
            if running[job.node] < self._concurrency[job.node]:
                running[job.node] += 1
                admitted.append(job)
            else:
                kept.append(job)
        self._waiting = kept
        return admitted

    def _limit(self) -> float | None:
        timeouts = [job.timeout for job in self._running.values()]
        longest = max((timeout for timeout in timeouts if timeout is not None), default=0.0)
        return None if None in timeouts else longest + ASYNC_STEP_SECONDS + GRACE_SECONDS
