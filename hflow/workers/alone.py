"""The lane of bodies that take long, or end their process: each job alone in a process.

Processes are started as they are needed, so that slow jobs hold up nobody: not the other jobs of their
node, while there are fewer of them than it may have processes, and never those of other nodes. They are
started one after the other, as most jobs that come here were only the neighbours of a slow one.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import Future

from pebble import ProcessPool

from hflow.workers.lane import Ended, Lane, Return, end
from hflow.workers.pool_child import Job, Name, run_alone

MOST_PROCESSES = 16
"""Jobs of one node that run at once, at most: each costs a process."""
STAGGER_SECONDS = 0.1
"""From one process to the next."""
GRACE_SECONDS = 1.0
"""An asynchronous body is stopped by its loop; one that blocks the loop, by its end, this long after."""


class AloneLane(Lane):
    """Queues by node, and processes of one job each."""

    def __init__(
        self,
        start: Callable[[], ProcessPool],
        concurrency: Mapping[str, int],
        awaited: Set[str],
        on_return: Callable[[Return], None],
    ) -> None:
        """Set it.

        Args:
            start: a pool of one process.
            concurrency: node -> jobs that it may run at once.
            awaited: nodes whose bodies are asynchronous.
            on_return: takes what ended.
        """
        super().__init__(on_return)
        self._start = start
        self._concurrency = concurrency
        self._awaited = awaited
        self._waiting: dict[str, deque[Job]] = {}
        self._idle: list[ProcessPool] = []
        self._busy: dict[Name, tuple[ProcessPool, Future[bytes]]] = {}
        self._next_start = 0.0
        self.is_starting = False
        """Whether jobs wait for a process that may be started soon."""

    def queue(self, job: Job) -> None:
        """Take a job behind the others of its node."""
        self._waiting.setdefault(job.node, deque()).append(job)

    def pump(self) -> None:
        """Start jobs, each in an idle process or a new one."""
        self.is_starting = False
        running = Counter(node for node, _ in self._busy)
        for node, jobs in self._waiting.items():
            while jobs and running[node] < min(MOST_PROCESSES, self._concurrency[node]):
                process = self._process()
                if process is None:
                    self.is_starting = True
                    return
                running[node] += 1
                self._run(jobs.popleft(), process)

    def settle(self, returned: Return) -> tuple[Ended, list[Job]]:
        """The outcome of the one job."""
        (job,) = returned.jobs
        process, _ = self._busy.pop(job.name)
        self._idle.append(process)
        outcomes = returned.outcomes()
        return [(job, returned.blame(job) if outcomes is None else outcomes[0])], []

    def cancel(self, names: Iterable[Name]) -> list[Job]:
        """Let go of jobs; the processes of those that run are killed."""
        gone = set(names)
        found = []
        for node, jobs in self._waiting.items():
            found += [job for job in jobs if job.name in gone]
            self._waiting[node] = deque(job for job in jobs if job.name not in gone)
        for name in gone & self._busy.keys():
            self._busy[name][1].cancel()
        return found

    def close(self) -> None:
        """End the processes."""
        for process in (*self._idle, *(process for process, _ in self._busy.values())):
            end(process)

    def _process(self) -> ProcessPool | None:
        """One that has nothing to do; None: not yet."""
        while self._idle:
            process = self._idle.pop()
            if process.active:
                return process
            end(process)  # it died while it had nothing to do
        if time.monotonic() < self._next_start:
            return None
        self._next_start = time.monotonic() + STAGGER_SECONDS
        return self._start()

    def _run(self, job: Job, process: ProcessPool) -> None:
        limit = job.timeout
        if limit is not None and job.node in self._awaited:
            limit += GRACE_SECONDS
        self._busy[job.name] = process, self._call(process, [job], limit, run_alone, job)
