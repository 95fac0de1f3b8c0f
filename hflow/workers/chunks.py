"""The lane of synchronous bodies: chunks of jobs.

Messages cost more than most bodies, so jobs travel in chunks. A chunk that does not come back soon is
killed: none of its jobs waits for a slow neighbour, and the pool runs each of them alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from pebble import ProcessPool

from hflow.workers.lane import PATIENCE_SECONDS, Ended, Return, SharedLane
from hflow.workers.pool_child import Job, Name, run_chunk

CHUNK_SIZE = 256
"""Most jobs of one message."""
SLICE_SECONDS = 0.25
"""A chunk starts no further job after this long: results flow, and slow bodies spread out."""
CHUNKS_A_PROCESS = 2
"""Chunks sent ahead, so that no process waits for a message."""


class ChunkLane(SharedLane):
    """Queues by node, served in turn."""

    def __init__(
        self,
        start: Callable[[], ProcessPool],
        num_processes: int,
        concurrency: Mapping[str, int],
        on_return: Callable[[Return], None],
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

    def settle(self, returned: Return) -> tuple[Ended, list[Job]]:
        """Outcomes of the jobs that ran; what did not start waits again, a killed chunk is lost."""
        jobs = returned.jobs
        self._flying[jobs[0].node] -= 1
        outcomes = returned.outcomes()
        if outcomes is None:
            return [], list(jobs)
        self._waiting.setdefault(jobs[0].node, deque()).extendleft(reversed(jobs[len(outcomes) :]))
        return list(zip(jobs, outcomes, strict=False)), []

    def cancel(self, names: Iterable[Name]) -> list[Job]:
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
