"""The lane of asynchronous bodies: one process, one loop, advanced in short steps.

Each step hands new jobs to the loop and brings back those that finished; the others stay in the
loop. Where a body blocks the loop, or ends its process, the pool runs each that ran there alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from pebble import ProcessPool

from hflow.workers.lane import PATIENCE_SECONDS, Ended, Return, SharedLane
from hflow.workers.pool_child import ASYNC_STEP_SECONDS, Job, Name, run_async


class StepLane(SharedLane):
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
        self._running: dict[Name, Job] = {}
        self._cancelled: list[Name] = []
        self._stepping = False

    def queue(self, job: Job) -> None:
        """Take a job behind the others."""
        self._waiting.append(job)

    def pump(self) -> None:
        """Make the next step, if none is under way and there is anything to run."""
        if self._stepping:
            return
        new = self._admit()
        self._running.update((job.name, job) for job in new)
        if self._running:
            self._stepping = True
            cancelled, self._cancelled = self._cancelled, []
            self._send(new, ASYNC_STEP_SECONDS + PATIENCE_SECONDS, run_async, cancelled)

    def settle(self, returned: Return) -> tuple[Ended, list[Job]]:
        """Outcomes of the jobs that finished; with a process, all that ran there is lost."""
        self._stepping = False
        outcomes = returned.outcomes()
        if outcomes is not None:
            return [(self._running.pop((outcome.node, outcome.key)), outcome) for outcome in outcomes], []
        lost = list(self._running.values())
        self._running.clear()
        return [], lost

    def cancel(self, names: Iterable[Name]) -> list[Job]:
        """Let go of jobs; those that run end with the next step."""
        gone = set(names)
        self._cancelled += gone & self._running.keys()
        found = [job for job in self._waiting if job.name in gone]
        self._waiting = deque(job for job in self._waiting if job.name not in gone)
        return found

    def _admit(self) -> list[Job]:
        """Jobs that may start now: as many as their nodes allow."""
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
