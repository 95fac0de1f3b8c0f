"""What the lanes of the pool have in common: killable calls and their returns."""

from __future__ import annotations

import abc
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any

from pebble import ProcessExpired, ProcessPool

from hflow.workers.bodies.pool_child import (
    ASYNC_STEP_SECONDS,
    Job,
    JobId,
    JobResult,
    run_alone,
    run_async,
    run_chunk,
    too_long,
)

PATIENCE_SECONDS = 1.0
"""Nobody waits longer for a neighbour in the same process: it is killed, and all its jobs run alone."""

JobResults = list[tuple[Job, JobResult]]


@dataclass(frozen=True)
class FinishedCall:
    """A call into a child process that ended, one way or another."""

    lane: PoolLane
    jobs: Sequence[Job]
    """The jobs that were sent with it."""
    future: Future[bytes]

    def outcomes(self) -> list[JobResult] | None:
        """What the child reported; None when it was killed or died.

        Raises:
            Exception: the pool itself failed.
        """
        lost = TimeoutError | ProcessExpired | BrokenProcessPool
        if self.future.cancelled() or isinstance(self.future.exception(), lost):
            return None
        outcomes: list[JobResult] = pickle.loads(self.future.result())
        return outcomes

    def blame(self, job: Job) -> JobResult:
        """The outcome of the one job that its process was killed for, or died of."""
        error = None if self.future.cancelled() else self.future.exception()
        if isinstance(error, TimeoutError):
            return JobResult(job.node, job.key, reason="timeout", message=too_long(job.timeout), killed=True)
        code = f" (exit code {error.exitcode})" if isinstance(error, ProcessExpired) else ""
        return JobResult(job.node, job.key, reason="failed", message=f"its process died{code}", killed=True)


class PoolLane(abc.ABC):
    """A queue of jobs in front of processes; used by the pool's thread only."""

    def __init__(self, on_return: Callable[[FinishedCall], None]) -> None:
        self._on_return = on_return

    @abc.abstractmethod
    def queue(self, job: Job) -> None:
        """Take a job."""

    @abc.abstractmethod
    def pump(self) -> None:
        """Start what can be started."""

    @abc.abstractmethod
    def settle(self, returned: FinishedCall) -> tuple[JobResults, list[Job]]:
        """The jobs that a return ended, and those that were lost with their process; others wait again."""

    @abc.abstractmethod
    def cancel(self, names: Iterable[JobId]) -> list[Job]:
        """Let go of jobs: those that had not started are returned, those that run return soon."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the processes."""

    def _call(
        self,
        processes: ProcessPool,
        jobs: Sequence[Job],
        timeout: float | None,
        function: Callable[..., bytes],
        *arguments: Any,
    ) -> Future[bytes]:
        future: Future[bytes] = processes.schedule(function, args=arguments, timeout=timeout)
        future.add_done_callback(partial(self._returned, jobs))
        return future

    def _returned(self, jobs: Sequence[Job], future: Future[bytes]) -> None:
        self._on_return(FinishedCall(self, jobs, future))


class SharedLane(PoolLane):
    """A lane whose jobs share the processes of one pool, which is there from the start."""

    def __init__(self, start: Callable[[], ProcessPool], on_return: Callable[[FinishedCall], None]) -> None:
        super().__init__(on_return)
        self._start = start
        self._processes = start()

    def start(self) -> None:
        """Start the processes before the first job comes."""
        assert self._processes.active

    def close(self) -> None:
        """End the processes."""
        end(self._processes)

    def _send(
        self, jobs: Sequence[Job], timeout: float | None, function: Callable[..., bytes], *more: Any
    ) -> None:
        if not self._processes.active:  # all its processes died while they had nothing to do
            self.close()
            self._processes = self._start()
        self._call(self._processes, jobs, timeout, function, jobs, *more)


def end(processes: ProcessPool) -> None:
    """Kill what runs in a pool, and end it."""
    processes.stop()
    processes.join()


# -------------------- The lane of synchronous bodies: chunks of jobs.
# Messages cost more than most bodies, so jobs travel in chunks. A chunk that does not come back soon is
# killed: none of its jobs waits for a slow neighbour, and the pool runs each of them alone.


CHUNK_SIZE = 256
"""Most jobs of one message."""
SLICE_SECONDS = 0.25
"""A chunk starts no further job after this long: results flow, and slow bodies spread out."""
CHUNKS_A_PROCESS = 2
"""Chunks sent ahead, so that no process waits for a message."""


class SyncLane(SharedLane):
    """Queues by node, served in turn."""

    def __init__(
        self,
        start: Callable[[], ProcessPool],
        num_processes: int,
        concurrency: Mapping[str, int],
        on_return: Callable[[FinishedCall], None],
    ) -> None:
        super().__init__(start, on_return)
        self._num_processes = num_processes
        self._concurrency = concurrency
        self._waiting: dict[str, deque[Job]] = {}
        self._flying: Counter[str] = Counter()

    def queue(self, job: Job) -> None:
        """Take a job behind the others of its node."""
        self._waiting.setdefault(job.node, deque()).append(job)

    def pump(self) -> None:
        """Send chunks while there is room."""
        while nodes := [node for node, jobs in self._waiting.items() if jobs and self._has_room(node)]:
            for node in nodes:
                if self._has_room(node):
                    self._send_chunk(node)

    def settle(self, returned: FinishedCall) -> tuple[JobResults, list[Job]]:
        """Outcomes of the jobs that ran; what did not start waits again, a killed chunk is lost."""
        jobs = returned.jobs
        self._flying[jobs[0].node] -= 1
        outcomes = returned.outcomes()
        if outcomes is None:
            return [], list(jobs)
        self._waiting.setdefault(jobs[0].node, deque()).extendleft(reversed(jobs[len(outcomes) :]))
        return list(zip(jobs, outcomes, strict=False)), []

    def cancel(self, names: Iterable[JobId]) -> list[Job]:
        """Let go of jobs that wait; those in a chunk run, as they do not take long."""
        gone = set(names)
        found = []
        for node, jobs in self._waiting.items():
            found += [job for job in jobs if job.name in gone]
            self._waiting[node] = deque(job for job in jobs if job.name not in gone)
        return found

    def take_out(self, node: str) -> list[Job]:
        """The jobs of a node that wait, which they do no longer."""
        return list(self._waiting.pop(node, ()))

    def _has_room(self, node: str) -> bool:
        ahead = CHUNKS_A_PROCESS * self._num_processes
        own = ahead if self._concurrency[node] >= self._num_processes else self._concurrency[node]
        return self._flying.total() < ahead and self._flying[node] < own

    def _send_chunk(self, node: str) -> None:
        jobs = self._waiting[node]
        size = min(CHUNK_SIZE, -(-len(jobs) // self._num_processes))
        chunk = [jobs.popleft() for _ in range(size)]
        self._flying[node] += 1
        limit = min(PATIENCE_SECONDS, chunk[0].timeout or PATIENCE_SECONDS)
        self._send(chunk, SLICE_SECONDS + limit, run_chunk, SLICE_SECONDS)


# -------------------- The lane of asynchronous bodies: one process, one loop, advanced in short steps.
# Each step hands new jobs to the loop and brings back those that finished; the others stay in the
# loop. Where a body blocks the loop, or ends its process, the pool runs each that ran there alone.


class AsyncLane(SharedLane):
    """At most one step is under way."""

    def __init__(
        self,
        start: Callable[[], ProcessPool],
        concurrency: Mapping[str, int],
        on_return: Callable[[FinishedCall], None],
    ) -> None:
        super().__init__(start, on_return)
        self._concurrency = concurrency
        self._waiting: deque[Job] = deque()
        self._running: dict[JobId, Job] = {}
        self._cancelled: list[JobId] = []
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

    def settle(self, returned: FinishedCall) -> tuple[JobResults, list[Job]]:
        """Outcomes of the jobs that finished; with a process, all that ran there is lost."""
        self._stepping = False
        outcomes = returned.outcomes()
        if outcomes is not None:
            return [(self._running.pop((outcome.node, outcome.key)), outcome) for outcome in outcomes], []
        lost = list(self._running.values())
        self._running.clear()
        return [], lost

    def cancel(self, names: Iterable[JobId]) -> list[Job]:
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


# -------------------- The lane of bodies that take long, or end their process: each job alone in a
# process.
# Processes are started as they are needed, so that slow jobs hold up nobody: not the other jobs of their
# node, while there are fewer of them than it may have processes, and never those of other nodes. They are
# started one after the other, as most jobs that come here were only the neighbours of a slow one.


MOST_PROCESSES = 16
"""Jobs of one node that run at once, at most: each costs a process."""
STAGGER_SECONDS = 0.1
"""From one process to the next."""
GRACE_SECONDS = 1.0
"""An asynchronous body is stopped by its loop; one that blocks the loop, by its end, this long after."""


class IsolatedLane(PoolLane):
    """Queues by node, and processes of one job each."""

    def __init__(
        self,
        start: Callable[[], ProcessPool],
        concurrency: Mapping[str, int],
        awaited: Set[str],
        on_return: Callable[[FinishedCall], None],
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
        self._busy: dict[JobId, tuple[ProcessPool, Future[bytes]]] = {}
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

    def settle(self, returned: FinishedCall) -> tuple[JobResults, list[Job]]:
        """The outcome of the one job."""
        (job,) = returned.jobs
        process, _ = self._busy.pop(job.name)
        self._idle.append(process)
        outcomes = returned.outcomes()
        return [(job, returned.blame(job) if outcomes is None else outcomes[0])], []

    def cancel(self, names: Iterable[JobId]) -> list[Job]:
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
