"""`Pool`: runs per-sample and per-group bodies in persistent processes that can be killed.

A body that raises, is killed or runs out of time fails only its own sample, and is tried again up to
`retries` times, each time after a longer wait. Jobs of synchronous bodies are sent in chunks, which keeps
messages few; asynchronous bodies share the event loop of one process (see `hflow.workers.bodies.pool_lanes`).
A node whose type has a `setup` has a process of its own, in which that has run. A job that is slow, or ends
its process, therefore affects the jobs that share the process, but only once: all jobs that were lost with a
process run again in processes of their own, and so do all further jobs of the synchronous node concerned.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pebble import ProcessExpired, ProcessPool

from hflow.base.errors import RunError, WorkerFailureError
from hflow.data.batches.returned_values import DeclaredReturns
from hflow.processes.forkserver import CleanContext
from hflow.processes.pickling import pickle_with_bodies
from hflow.services.client import services_of_process
from hflow.types.node_setup import setup_of
from hflow.workers.bodies.body_output import BodyPipe, LineSink, log_levels
from hflow.workers.bodies.pool_child import Job, JobId, JobResult, cancelled_result, is_async, load_bodies
from hflow.workers.bodies.pool_lanes import (
    MAX_ISOLATED,
    STAGGER_SECONDS,
    AsyncLane,
    DirectLane,
    FinishedCall,
    FinishedJobs,
    IsolatedLane,
    PoolLane,
    SharedLane,
    SyncLane,
)
from hflow.workers.interface import BodyRetry

DEFAULT_ASYNC_CONCURRENCY = 64

KILLED_RETRIES = 2
"""Further attempts, unless the node says how many, after the process of a body was killed: the body may have
done nothing wrong."""
MAX_BACKOFF_SECONDS = 60.0
"""The longest wait before a further attempt."""


@dataclass(frozen=True)
class PoolBody:
    """A body and how it is run."""

    body: Callable[..., Any]
    timeout: float | None = None
    """Seconds for one attempt."""
    retries: int | None = None
    """Further attempts after one that failed. None: `KILLED_RETRIES` if its process was killed, else none."""
    backoff: float = 1.0
    """Seconds before the first further attempt. Each wait is twice as long as the one before."""
    concurrency: int | None = None
    """Most calls that one worker runs at the same time. None: as many as there are processes (`MAX_ISOLATED`
    for slow bodies), and `DEFAULT_ASYNC_CONCURRENCY` for asynchronous bodies."""
    returns: DeclaredReturns | None = None
    """What the body declares to return; None: anything that JSON can hold."""


class Pool:
    """Runs jobs, and reports their results from a thread of its own.

    With 0 processes for synchronous bodies, all run in this process, on that thread; else one more is for
    asynchronous ones. `on_results` receives jobs that finished at the same time, `on_retry` one that is tried
    again, and `on_error` an exception after which the pool cannot continue.
    """

    def __init__(
        self,
        bodies: Mapping[str, PoolBody],
        num_processes: int,
        seed: int,
        on_results: Callable[[Sequence[JobResult]], None],
        on_retry: Callable[[BodyRetry], None],
        on_error: Callable[[BaseException], None],
        on_lines: LineSink = lambda _: None,
    ) -> None:
        self._bodies = bodies
        self._seed = seed
        self._on_results = on_results
        self._on_retry = on_retry
        self._on_error = on_error
        self._inbox: queue.SimpleQueue[Sequence[Job] | _Cancel | FinishedCall | None] = queue.SimpleQueue()
        """Messages to the pool's thread: new jobs, cancelled ones, finished calls; None ends it."""
        self._retried: dict[JobId, int] = {}
        """Unfinished jobs -> how often they were tried again."""
        self._waiting: list[tuple[float, int, PoolLane, Job]] = []
        """Heap of jobs to try again, with the monotonic time when, and a number that keeps their order."""
        self._numbers = itertools.count()
        self._jitter = random.Random()
        self._cancelled: set[JobId] = set()
        with_setup = {name for name, spec in bodies.items() if setup_of(spec.body) is not None}
        self._sync_lane: SyncLane | None = None
        self._pipe = BodyPipe(on_lines) if num_processes else None
        self._isolated_lane_of: dict[str, IsolatedLane] = {}
        """Node -> the lane of its jobs that were lost with their process."""
        self._lane_of: dict[str, PoolLane]
        self._lanes: tuple[PoolLane, ...]
        if num_processes:
            self._make_lanes(bodies, num_processes, with_setup)
        else:
            pickled = {name: self._pickle_body(name) for name in bodies}
            load_bodies(pickled, seed, self._returns(set(bodies)), None, {}, services_of_process())
            direct = DirectLane(self._inbox.put)
            self._lane_of, self._lanes = dict.fromkeys(bodies, direct), (direct,)
        try:
            for lane in set(self._lane_of.values()):
                if isinstance(lane, SharedLane):
                    lane.start()
        except BrokenProcessPool:
            raise _no_processes() from None
        self._thread = threading.Thread(target=self._serve, name="body-pool", daemon=True)
        self._thread.start()
        self._set_up(sorted(with_setup))

    def _make_lanes(self, bodies: Mapping[str, PoolBody], num_processes: int, with_setup: set[str]) -> None:
        """Make the lanes, and decide which one runs the jobs of each node."""
        async_nodes = {name for name, spec in bodies.items() if is_async(spec.body)}
        without_setup = set(bodies) - with_setup
        sync_lane = SyncLane(
            partial(self._start_processes, without_setup - async_nodes, num_processes),
            num_processes,
            {name: spec.concurrency or num_processes for name, spec in bodies.items()},
            self._inbox.put,
        )
        async_limits = {name: spec.concurrency or DEFAULT_ASYNC_CONCURRENCY for name, spec in bodies.items()}
        async_lane = AsyncLane(
            partial(self._start_processes, without_setup & async_nodes, 1), async_limits, self._inbox.put
        )
        isolated_lane = IsolatedLane(
            partial(self._start_processes, without_setup, 1),
            {name: spec.concurrency or MAX_ISOLATED for name, spec in bodies.items()},
            async_nodes,
            self._inbox.put,
        )
        self._isolated_lane_of = dict.fromkeys(without_setup, isolated_lane)
        self._lane_of = {name: async_lane if name in async_nodes else sync_lane for name in without_setup}
        for name in sorted(with_setup):
            start = partial(self._start_processes, {name}, 1)
            own = IsolatedLane(start, {name: 1}, async_nodes, self._inbox.put)
            self._isolated_lane_of[name] = own
            self._lane_of[name] = (
                AsyncLane(start, async_limits, self._inbox.put) if name in async_nodes else own
            )
        used = (sync_lane, async_lane, isolated_lane, *self._lane_of.values())
        self._sync_lane = sync_lane
        self._lanes = tuple(dict.fromkeys((*used, *self._isolated_lane_of.values())))

    def _set_up(self, nodes: Sequence[str]) -> None:
        """Wait until the processes of these nodes are set up.

        Raises:
            RunError: when a setup fails.
        """
        problems = [(node, self._lane_of[node].set_up(node)) for node in nodes]
        for node, future in problems:
            try:
                problem = future.result()
            except ProcessExpired as error:
                problem = f"its process died during setup (exit code {error.exitcode})"
            if problem:
                self.close()
                raise RunError(f"node {node!r}: {problem}")

    def submit(
        self,
        node: str,
        calls: Mapping[int, Mapping[str, Any]],
        lengths: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        """Queue calls of a node's body, by key.

        `lengths` is key -> the number of tokens of each sample of the call; None: the body declares nothing.
        """
        timeout, lengths = self._bodies[node].timeout, lengths or {}
        self._inbox.put(
            [Job(node, key, arguments, timeout, lengths.get(key, ())) for key, arguments in calls.items()]
        )

    def cancel(self, job_ids: Iterable[JobId]) -> None:
        """Stop jobs, which are then reported as failed; jobs that have ended are not reported again."""
        self._inbox.put(_Cancel(tuple(job_ids)))

    def read_output(self) -> None:
        """Pass on what bodies have printed so far."""
        if self._pipe is not None:
            self._pipe.drain()

    def close(self) -> None:
        """Kill what runs and end the processes; safe to call twice."""
        self._inbox.put(None)
        self._thread.join()
        for lane in self._lanes:
            lane.close()
        if self._pipe is not None:
            self._pipe.close()

    def _start_processes(self, nodes: set[str], num_processes: int) -> ProcessPool:
        assert self._pipe is not None, "bodies run in this process"
        pickled = {node: self._pickle_body(node) for node in sorted(nodes)}
        return ProcessPool(
            num_processes,
            initializer=load_bodies,
            initargs=(
                pickled,
                self._seed,
                self._returns(nodes),
                self._pipe.writer,
                log_levels(),
                services_of_process(),
            ),
            context=CleanContext(),
        )

    def _returns(self, nodes: set[str]) -> dict[str, DeclaredReturns]:
        return {node: spec.returns for node in nodes if (spec := self._bodies[node]).returns is not None}

    def _pickle_body(self, node: str) -> bytes:
        body = self._bodies[node].body
        try:
            return pickle_with_bodies(body, [body])
        except RunError as error:
            raise RunError(f"node {node!r}: {error}") from error

    # On the pool's thread

    def _serve(self) -> None:
        try:
            while self._take_messages():
                self._add_due_jobs()
                for lane in self._lanes:
                    lane.start_jobs()
        except BrokenProcessPool:
            self._on_error(_no_processes())
        except BaseException as error:  # noqa: BLE001 - the thread that waits for results raises it
            self._on_error(error)

    def _take_messages(self) -> bool:
        """Wait for messages and handle all there are. Returns False when the thread has to end."""
        is_waiting = any(lane.is_waiting_to_start for lane in self._isolated_lane_of.values())
        timeouts = [STAGGER_SECONDS] if is_waiting else []
        if self._waiting:
            timeouts.append(max(0.0, self._waiting[0][0] - time.monotonic()))
        try:
            messages = [self._inbox.get(timeout=min(timeouts, default=None))]
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
                self.read_output()
                finished, lost = message.lane.finish(message)
                self._isolate(lost)
                if lost and (exit_message := message.exit_message()):
                    for job in lost:
                        self._on_retry(BodyRetry(job.node, job.key, exit_message, time.time(), 0.0))
                self._finish(finished)
            case _Cancel(job_ids):
                unfinished = [job_id for job_id in job_ids if job_id in self._retried]
                self._cancelled.update(unfinished)
                removed = [job for lane in self._lanes for job in lane.cancel(unfinished)]
                removed += [job for *_, job in self._waiting if job.id in self._cancelled]
                self._waiting = [entry for entry in self._waiting if entry[-1].id not in self._cancelled]
                heapq.heapify(self._waiting)
                self._finish([(job, cancelled_result(job)) for job in removed])
            case _:
                for job in message:
                    self._retried[job.id] = 0
                    self._lane_of[job.node].add(job)

    def _isolate(self, lost: Sequence[Job]) -> None:
        """Move jobs that were lost with a shared process, and all jobs of their synchronous nodes."""
        if self._sync_lane is None:
            return
        for job in lost:
            self._isolated_lane_of[job.node].add(job)
            if self._lane_of[job.node] is self._sync_lane:
                self._lane_of[job.node] = self._isolated_lane_of[job.node]
        for node, lane in self._lane_of.items():
            if lane is self._isolated_lane_of[node]:
                for job in self._sync_lane.remove_node(node):
                    lane.add(job)

    def _finish(self, finished: FinishedJobs) -> None:
        """Let failed jobs wait for another attempt while they have one left, and report all others."""
        final = []
        for job, result in finished:
            retried, is_wanted = self._retried[job.id], job.id not in self._cancelled
            if result.reason is not None and is_wanted and retried < self._max_retries(result):
                self._retried[job.id] = retried + 1
                self._retry_later(job, result, retried)
            else:
                del self._retried[job.id]
                self._cancelled.discard(job.id)
                final.append(_with_attempts(result, retried + 1) if is_wanted else result)
        if final:
            self._on_results(final)

    def _max_retries(self, result: JobResult) -> int:
        """Return the number of times that a job with this failure may be tried again."""
        retries = self._bodies[result.node].retries
        return retries if retries is not None else KILLED_RETRIES if result.by_signal else 0

    def _retry_later(self, job: Job, result: JobResult, num_retried: int) -> None:
        """Try a failed job again after a wait, which is a little random, so that jobs spread out."""
        wait = min(MAX_BACKOFF_SECONDS, self._bodies[job.node].backoff * 2.0**num_retried)
        wait *= self._jitter.uniform(0.5, 1.0)
        lane = (self._isolated_lane_of if result.killed else self._lane_of)[job.node]
        heapq.heappush(self._waiting, (time.monotonic() + wait, next(self._numbers), lane, job))
        self._on_retry(BodyRetry(job.node, job.key, result.message, time.time(), wait))

    def _add_due_jobs(self) -> None:
        """Queue the jobs that have waited long enough for another attempt."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            *_, lane, job = heapq.heappop(self._waiting)
            lane.add(job)


def _with_attempts(result: JobResult, num_attempts: int) -> JobResult:
    """Return a result whose message says how often a failed job was tried, if more than once."""
    if result.reason is None or num_attempts == 1:
        return result
    return replace(result, message=f"{result.message}; tried {num_attempts} times")


@dataclass(frozen=True)
class _Cancel:
    """A request to stop jobs."""

    job_ids: tuple[JobId, ...]


def _no_processes() -> WorkerFailureError:
    """Return the error of a pool that can start no process, as the process that forks them was killed."""
    return WorkerFailureError("no process can be started for the bodies: the one that starts them was killed")
