"""The lane of synchronous bodies: chunks of jobs, a killed chunk again one by one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

from pebble import ProcessPool

from hflow.workers.lane import Lane, Return
from hflow.workers.pool_child import Job, Outcome, run_chunk

CHUNK_SIZE = 256
"""Most jobs of one message."""
SLICE_SECONDS = 0.25
"""A chunk starts no further job after this long: results flow, and slow bodies spread out."""
CHUNKS_A_PROCESS = 2
"""Chunks sent ahead, so that no process waits for a message."""


class ChunkLane(Lane):
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
        """Send chunks while there is room; suspects come first and travel alone."""
        while self._suspects and self._has_room(self._suspects[0].node):
            self._send([self._suspects.popleft()], alone=True)
        while nodes := [node for node, jobs in self._waiting.items() if jobs and self._has_room(node)]:
            for node in nodes:
                if self._has_room(node):
                    self._send(self._chunk(node), alone=False)

    def settle(self, returned: Return) -> list[tuple[Job, Outcome]]:
        """Outcomes of the jobs that ran; what did not start waits again, a killed chunk is suspect."""
        jobs = returned.jobs
        self._flying[jobs[0].node] -= 1
        outcomes = returned.outcomes()
        if outcomes is None and len(jobs) == 1:
            return [(jobs[0], returned.blame(jobs[0]))]
        if outcomes is None:
            self._suspects.extend(jobs)
            return []
        self._waiting[jobs[0].node].extendleft(reversed(jobs[len(outcomes) :]))
        return list(zip(jobs, outcomes, strict=False))

    def _has_room(self, node: str) -> bool:
        ahead = CHUNKS_A_PROCESS * self._num_processes
        own = ahead if self._concurrency[node] >= self._num_processes else self._concurrency[node]
        return self._flying.total() < ahead and self._flying[node] < own

    def _chunk(self, node: str) -> list[Job]:
        jobs = self._waiting[node]
        size = min(CHUNK_SIZE, -(-len(jobs) // self._num_processes))
        return [jobs.popleft() for _ in range(size)]

    def _send(self, jobs: list[Job], alone: bool) -> None:
        self._flying[jobs[0].node] += 1
        limit = jobs[0].timeout
        if limit is not None and not alone:
            limit += SLICE_SECONDS
        self._call(jobs, limit, run_chunk, SLICE_SECONDS)
