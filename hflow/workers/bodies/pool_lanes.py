"""The lanes of the pool: queues of jobs in front of child processes that can be killed.

- `SyncLane`: synchronous bodies, many jobs per message, in a fixed number of processes.
- `AsyncLane`: asynchronous bodies, all on the event loop of one process.
- `IsolatedLane`: bodies that are slow or end their process, one job per process.

In the first two, jobs share a process, and a slow job would hold up the others. So a process that does not
answer in time is killed, and the jobs that were lost with it run in the isolated lane.
"""

from __future__ import annotations

import abc
import pickle
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pebble import ProcessExpired, ProcessPool
from typing_extensions import override

from hflow.base.errors import timeout_message
from hflow.workers.bodies.pool_child import (
    ASYNC_STEP_SECONDS,
    Job,
    JobId,
    JobResult,
    cancelled_result,
    run_async,
    run_chunk,
    run_isolated,
    setup_problem,
)

SHARED_TIMEOUT_SECONDS = 1.0
"""The longest time that a job may hold up others in its process. After it, the process is killed."""

CHUNK_SIZE = 256
"""Most jobs of one message in the synchronous lane."""
SLICE_SECONDS = 0.25
"""A chunk starts no further job after this long, so that results are returned and slow bodies spread out."""
CHUNKS_PER_PROCESS = 2
"""Chunks sent per process; more than one, so that no process waits for a message."""

MAX_ISOLATED = 16
"""Most jobs of one node that run at the same time in the isolated lane. Each needs a process."""
QUICK_SHARE = 0.25
"""Part of a node's places in the isolated lane that only quick jobs keep."""
NUM_RECENT = 16
"""Jobs of a node by which the isolated lane knows whether most of them are quick."""
STAGGER_SECONDS = 0.1
"""Time between the starts of two processes of the isolated lane."""
GRACE_SECONDS = 1.0
"""An asynchronous body that outlives its timeout by this much blocks its event loop, and is killed."""

FinishedJobs = list[tuple[Job, JobResult]]

_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
"""Exit codes of processes that another process or the kernel has ended, as when memory is short."""


@dataclass(frozen=True)
class FinishedCall:
    """A call into a child process that has ended: it returned, was cancelled, or its process died."""

    lane: PoolLane
    jobs: Sequence[Job]
    """The jobs that were sent with the call."""
    future: Future[bytes]

    def results(self) -> list[JobResult] | None:
        """Return the child process's report, or None if it was killed or died.

        Raises:
            Exception: when the process pool itself failed.
        """
        process_errors = TimeoutError | ProcessExpired | BrokenProcessPool
        if self.future.cancelled() or isinstance(self.future.exception(), process_errors):
            return None
        results: list[JobResult] = pickle.loads(self.future.result())
        return results

    def killed_result(self, job: Job) -> JobResult:
        """Return the result of the only job of a process that was killed or died."""
        message = self.exit_message()
        if message is None:
            message = timeout_message(job.timeout)
            return JobResult(job.node, job.key, reason="timeout", message=message, killed=True)
        error = None if self.future.cancelled() else self.future.exception()
        by_signal = isinstance(error, ProcessExpired) and error.exitcode in _FROM_OUTSIDE
        return JobResult(
            job.node, job.key, reason="failed", message=message, killed=True, by_signal=by_signal
        )

    def exit_message(self) -> str | None:
        """Describe how the process of a call without results ended; None if it was killed as it was slow."""
        error = None if self.future.cancelled() else self.future.exception()
        if isinstance(error, TimeoutError):
            return None
        code = f" (exit code {error.exitcode})" if isinstance(error, ProcessExpired) else ""
        return f"its process died{code}"


class PoolLane(abc.ABC):
    """A queue of jobs in front of processes. Only the pool's thread uses it; any may call `on_return`."""

    def __init__(self, on_return: Callable[[FinishedCall], None]) -> None:
        self._on_return = on_return

    @abc.abstractmethod
    def add(self, job: Job) -> None:
        """Queue a job."""

    @abc.abstractmethod
    def start_jobs(self) -> None:
        """Send queued jobs to processes, as many as have room."""

    @abc.abstractmethod
    def finish(self, call: FinishedCall) -> tuple[FinishedJobs, list[Job]]:
        """Handle a call of this lane that ended; jobs that did not start are queued again.

        Returns:
            The jobs that finished with their results, and the jobs that were lost with their process.
        """

    @abc.abstractmethod
    def cancel(self, job_ids: Iterable[JobId]) -> list[Job]:
        """Remove queued jobs and return them; stop running ones, which then finish as usual."""

    @abc.abstractmethod
    def close(self) -> None:
        """Kill what runs and end the processes."""

    @abc.abstractmethod
    def set_up(self, node: str) -> Future[str]:
        """Start a process for a node with a `setup`. Returns why that fails, empty if it does not."""

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


class DirectLane(PoolLane):
    """A lane whose jobs run in this process, on the pool's thread, one by one and without a time limit."""

    def __init__(self, on_return: Callable[[FinishedCall], None]) -> None:
        super().__init__(on_return)
        self._queue: deque[Job] = deque()

    @override
    def add(self, job: Job) -> None:
        self._queue.append(replace(job, timeout=None))

    @override
    def start_jobs(self) -> None:
        if self._queue:
            job, done = self._queue.popleft(), Future[bytes]()
            done.set_result(run_isolated(job))
            self._returned([job], done)

    @override
    def finish(self, call: FinishedCall) -> tuple[FinishedJobs, list[Job]]:
        return list(zip(call.jobs, call.results() or (), strict=True)), []

    @override
    def cancel(self, job_ids: Iterable[JobId]) -> list[Job]:
        unwanted = set(job_ids)
        removed = [job for job in self._queue if job.id in unwanted]
        self._queue = deque(job for job in self._queue if job.id not in unwanted)
        return removed

    @override
    def close(self) -> None:
        self._queue.clear()

    @override
    def set_up(self, node: str) -> Future[str]:
        done = Future[str]()
        done.set_result(setup_problem(node))
        return done


class SharedLane(PoolLane):
    """A lane whose jobs share the processes of one process pool."""

    def __init__(
        self, start_pool: Callable[[], ProcessPool], on_return: Callable[[FinishedCall], None]
    ) -> None:
        super().__init__(on_return)
        self._start_pool = start_pool
        self._processes = start_pool()

    def start(self) -> None:
        """Start the processes before the first job comes."""
        assert self._processes.active

    @override
    def close(self) -> None:
        stop_processes(self._processes)

    @override
    def set_up(self, node: str) -> Future[str]:
        future: Future[str] = self._processes.schedule(setup_problem, args=(node,))
        return future

    def _send(
        self, jobs: Sequence[Job], timeout: float | None, function: Callable[..., bytes], *more: Any
    ) -> None:
        if not self._processes.active:  # all its processes died while they were idle
            self.close()
            self._processes = self._start_pool()
        self._call(self._processes, jobs, timeout, function, jobs, *more)


class SyncLane(SharedLane):
    """The lane of synchronous bodies: a queue for each node, and the nodes take turns.

    Sending a message costs more than running most bodies, so jobs are sent in chunks. A chunk that does not
    return soon is killed, so that no job waits for a slow one in the same chunk.

    `concurrency` is node -> most jobs of it that run at the same time.
    """

    def __init__(
        self,
        start_pool: Callable[[], ProcessPool],
        num_processes: int,
        concurrency: Mapping[str, int],
        on_return: Callable[[FinishedCall], None],
    ) -> None:
        super().__init__(start_pool, on_return)
        self._num_processes = num_processes
        self._concurrency = concurrency
        self._queues: dict[str, deque[Job]] = {}
        self._num_chunks: Counter[str] = Counter()
        """Node -> chunks that were sent and have not returned."""

    @override
    def add(self, job: Job) -> None:
        self._queues.setdefault(job.node, deque()).append(job)

    @override
    def start_jobs(self) -> None:
        """Send chunks while there is room, one per node in turn."""
        while nodes := [node for node, jobs in self._queues.items() if jobs and self._has_room(node)]:
            for node in nodes:
                if self._has_room(node):
                    self._send_chunk(node)

    @override
    def finish(self, call: FinishedCall) -> tuple[FinishedJobs, list[Job]]:
        jobs = call.jobs
        self._num_chunks[jobs[0].node] -= 1
        results = call.results()
        if results is None:
            return [], list(jobs)
        self._queues.setdefault(jobs[0].node, deque()).extendleft(reversed(jobs[len(results) :]))
        return list(zip(jobs, results, strict=False)), []

    @override
    def cancel(self, job_ids: Iterable[JobId]) -> list[Job]:
        """Remove queued jobs and return them. Jobs of a chunk that was sent run, as they are short."""
        return _remove_jobs(self._queues, set(job_ids))

    def remove_node(self, node: str) -> list[Job]:
        """Remove the queued jobs of a node and return them."""
        return list(self._queues.pop(node, ()))

    def _has_room(self, node: str) -> bool:
        limit = CHUNKS_PER_PROCESS * self._num_processes
        node_limit = limit if self._concurrency[node] >= self._num_processes else self._concurrency[node]
        return self._num_chunks.total() < limit and self._num_chunks[node] < node_limit

    def _send_chunk(self, node: str) -> None:
        jobs = self._queues[node]
        size = min(CHUNK_SIZE, -(-len(jobs) // self._num_processes))
        chunk = [jobs.popleft() for _ in range(size)]
        self._num_chunks[node] += 1
        limit = min(SHARED_TIMEOUT_SECONDS, chunk[0].timeout or SHARED_TIMEOUT_SECONDS)
        self._send(chunk, SLICE_SECONDS + limit, run_chunk, SLICE_SECONDS)


class AsyncLane(SharedLane):
    """The lane of asynchronous bodies: one process with one event loop, which advances in short steps.

    Each step sends new jobs to the event loop and returns the results of those that ended; the others
    remain in the loop. At most one step is under way. If a body blocks the loop or ends the process,
    all jobs that ran there are lost.
    """

    def __init__(
        self,
        start_pool: Callable[[], ProcessPool],
        concurrency: Mapping[str, int],
        on_return: Callable[[FinishedCall], None],
    ) -> None:
        super().__init__(start_pool, on_return)
        self._concurrency = concurrency
        self._queue: deque[Job] = deque()
        self._running: dict[JobId, Job] = {}
        self._cancelled: list[JobId] = []
        """Running jobs to stop in the next step."""
        self._is_stepping = False

    @override
    def add(self, job: Job) -> None:
        self._queue.append(job)

    @override
    def start_jobs(self) -> None:
        """Start the next step, if none is under way and there is a job to run."""
        if self._is_stepping:
            return
        new = self._admit()
        self._running.update((job.id, job) for job in new)
        if self._running:
            self._is_stepping = True
            cancelled, self._cancelled = self._cancelled, []
            self._send(new, ASYNC_STEP_SECONDS + SHARED_TIMEOUT_SECONDS, run_async, cancelled)

    @override
    def finish(self, call: FinishedCall) -> tuple[FinishedJobs, list[Job]]:
        self._is_stepping = False
        results = call.results()
        if results is not None:
            return [(self._running.pop((result.node, result.key)), result) for result in results], []
        lost = list(self._running.values())
        self._running.clear()
        return [], lost

    @override
    def cancel(self, job_ids: Iterable[JobId]) -> list[Job]:
        """Remove queued jobs and return them; running ones are stopped by the next step."""
        cancelled = set(job_ids)
        self._cancelled += cancelled & self._running.keys()
        removed = [job for job in self._queue if job.id in cancelled]
        self._queue = deque(job for job in self._queue if job.id not in cancelled)
        return removed

    def _admit(self) -> list[Job]:
        """Take from the queue the jobs that may start now, by the concurrency of their nodes."""
        num_running = Counter(node for node, _ in self._running)
        admitted, remaining = [], deque[Job]()
        for job in self._queue:
            if num_running[job.node] < self._concurrency[job.node]:
                num_running[job.node] += 1
                admitted.append(job)
            else:
                remaining.append(job)
        self._queue = remaining
        return admitted


class IsolatedLane(PoolLane):
    """The lane of bodies that are slow or end their process: one job per process.

    A slow job does not hold up other nodes, nor its own node until `MAX_ISOLATED` jobs of that node run.
    Where most jobs of a node are quick, `QUICK_SHARE` of its places remain theirs: a job that is slow in one
    of them is killed, and runs again in another place when one is free. So a few slow jobs, however many
    wait, do not hold up the others.

    Processes are started as they are needed, with some time between two starts: most jobs that come here
    are not slow themselves but shared a process with a slow one, and soon leave their process to the next.
    """

    def __init__(
        self,
        start_process: Callable[[], ProcessPool],
        concurrency: Mapping[str, int],
        async_nodes: Set[str],
        on_return: Callable[[FinishedCall], None],
    ) -> None:
        super().__init__(on_return)
        self._start_process = start_process
        self._concurrency = concurrency
        self._async_nodes = async_nodes
        self._queues: dict[str, deque[Job]] = {}
        self._slow: dict[str, deque[Job]] = {}
        """Node -> queued jobs that were too slow for a place of quick jobs."""
        self._recent: dict[str, deque[bool]] = {}
        """Node -> whether its last jobs were quick."""
        self._idle: list[ProcessPool] = []
        self._busy: dict[JobId, _IsolatedCall] = {}
        self._next_start = 0.0
        """Monotonic time at which the next process may be started."""
        self.is_waiting_to_start = False
        """Whether queued jobs wait for the start of a process."""

    @override
    def add(self, job: Job) -> None:
        self._queues.setdefault(job.node, deque()).append(job)

    @override
    def start_jobs(self) -> None:
        """Start jobs, each in an idle process or a new one."""
        self.is_waiting_to_start = False
        num_running = Counter((node, call.must_be_quick) for (node, _), call in self._busy.items())
        for node in self._queues | self._slow:
            num_places = min(MAX_ISOLATED, self._concurrency[node])
            num_quick = int(QUICK_SHARE * num_places) if self._is_mostly_quick(node) else 0
            for must_be_quick, room in ((False, num_places - num_quick), (True, num_quick)):
                queues = (self._queues,) if must_be_quick else (self._slow, self._queues)
                room = min(room - num_running[node, must_be_quick], num_places - self._num_running(node))
                for jobs in (queue.get(node, ()) for queue in queues):
                    while jobs and room > 0:
                        process = self._idle_process()
                        if is_first := process is None:
                            process = self._new_process()
                        if process is None:
                            self.is_waiting_to_start = True
                            return
                        room -= 1
                        self._run(jobs.popleft(), process, must_be_quick, is_first)

    @override
    def finish(self, call: FinishedCall) -> tuple[FinishedJobs, list[Job]]:
        """Return the result of the call's only job, unless it was too slow for its place."""
        (job,) = call.jobs
        ended = self._busy.pop(job.id)
        self._idle.append(ended.process)
        results = call.results()
        was_too_slow = ended.must_be_quick and results is None and call.exit_message() is None
        is_quick = time.monotonic() - ended.start < SHARED_TIMEOUT_SECONDS
        if is_quick or was_too_slow or not ended.is_first:
            self._recent.setdefault(job.node, deque(maxlen=NUM_RECENT)).append(is_quick)
        if was_too_slow and ended.is_cancelled:
            return [(job, cancelled_result(job))], []
        if was_too_slow:
            self._slow.setdefault(job.node, deque()).append(job)
            return [], []
        return [(job, call.killed_result(job) if results is None else results[0])], []

    @override
    def cancel(self, job_ids: Iterable[JobId]) -> list[Job]:
        """Remove queued jobs and return them; the processes of running ones are killed."""
        cancelled = set(job_ids)
        removed = [*_remove_jobs(self._queues, cancelled), *_remove_jobs(self._slow, cancelled)]
        for job_id in cancelled & self._busy.keys():
            self._busy[job_id].is_cancelled = True
            self._busy[job_id].future.cancel()
        return removed

    @override
    def set_up(self, node: str) -> Future[str]:
        """Start a process for a node, which waits for its first job."""
        process = self._start_process()
        self._idle.append(process)
        future: Future[str] = process.schedule(setup_problem, args=(node,))
        return future

    @override
    def close(self) -> None:
        for process in (*self._idle, *(call.process for call in self._busy.values())):
            stop_processes(process)

    def _idle_process(self) -> ProcessPool | None:
        """Return a process that has no job, or None."""
        while self._idle:
            process = self._idle.pop()
            if process.active:
                return process
            stop_processes(process)  # it died while it was idle
        return None

    def _new_process(self) -> ProcessPool | None:
        """Return a new process for a job, or None if the next one may not be started yet."""
        if time.monotonic() < self._next_start:
            return None
        self._next_start = time.monotonic() + STAGGER_SECONDS
        return self._start_process()

    def _is_mostly_quick(self, node: str) -> bool:
        recent = self._recent.get(node, ())
        return 2 * sum(recent) >= len(recent)

    def _num_running(self, node: str) -> int:
        return sum(one == node for one, _ in self._busy)

    def _run(self, job: Job, process: ProcessPool, must_be_quick: bool, is_first: bool) -> None:
        limit = job.timeout
        if limit is not None and job.node in self._async_nodes:
            limit += GRACE_SECONDS
        must_be_quick &= limit is None or limit > SHARED_TIMEOUT_SECONDS
        if must_be_quick:
            limit = SHARED_TIMEOUT_SECONDS
        future = self._call(process, [job], limit, run_isolated, job)
        self._busy[job.id] = _IsolatedCall(process, future, must_be_quick, is_first, time.monotonic())


@dataclass
class _IsolatedCall:
    """A job that runs in the isolated lane."""

    process: ProcessPool
    future: Future[bytes]
    must_be_quick: bool
    """Whether it is killed, and runs again in another place, if it is slow."""
    is_first: bool
    """Whether its process has to start first."""
    start: float
    """Monotonic time."""
    is_cancelled: bool = False


def stop_processes(processes: ProcessPool) -> None:
    """Kill what runs in a process pool, and end its processes."""
    processes.stop()
    processes.join()


def _remove_jobs(queues: dict[str, deque[Job]], job_ids: Set[JobId]) -> list[Job]:
    """Remove these jobs from queues by node, and return them."""
    removed = []
    for node, jobs in queues.items():
        removed += [job for job in jobs if job.id in job_ids]
        queues[node] = deque(job for job in jobs if job.id not in job_ids)
    return removed
