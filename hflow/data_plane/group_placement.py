"""`GroupPlacer`: which worker each group of samples runs on."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from hflow.planner.plan.rows import Plan, ScheduledStream


class GroupPlacer:
    """Places each group on the least loaded worker of its stream; all samples of a group stay together.

    Of a plan whose runs must be equal bit for bit, a group's number decides.

    So group-level bodies and prefix caches find the whole group on one worker. A worker's load is the number
    of its unfinished samples.
    """

    def __init__(self, plan: Plan) -> None:
        self._dp_heads = {
            stream.name: tuple(sorted(stream_dp_heads(plan, stream))) for stream in plan.schedule.streams
        }
        self._is_deterministic = plan.deterministic
        self._written = {stream.name for stream in plan.schedule.streams if not stream.replicas}
        self._loads = _Loads(plan.cluster.num_devices, self._dp_heads.values())
        self._home: dict[tuple[str, int], int] = {}
        self._num_unfinished: dict[tuple[str, int], int] = {}
        self._num_waiting: dict[tuple[str, int], int] = {}
        """Samples of a group that are neither refused nor bound to a batch. A group without any, and without
        unfinished samples, is forgotten."""

    def place(self, stream: str, group: int, num_samples: int) -> int:
        """Choose a worker for a group and remember it."""
        dp_heads = self._dp_heads[stream]
        # Loads depend on timing. Where nothing is generated, there is none to balance.
        is_fixed = self._is_deterministic or stream in self._written
        worker = dp_heads[group % len(dp_heads)] if is_fixed else self._loads.lightest(dp_heads)
        self._loads.add(worker, num_samples)
        self._home[stream, group] = worker
        self._num_unfinished[stream, group] = self._num_waiting[stream, group] = num_samples
        return worker

    def rebalance_moves(self, stream: str, groups: Iterable[int]) -> dict[int, int]:
        """Return the groups that should move to a less loaded engine, each with that engine's worker.

        None moves where two runs must be equal bit for bit. Groups are in the order in which they move.
        """
        load = self._loads.by_worker()
        moves: dict[int, int] = {}
        if self._is_deterministic:
            return moves
        by_load = [(load[dp_head], dp_head) for dp_head in self._dp_heads[stream]]
        heapify(by_load)
        for group in groups:
            src, size = self._home[stream, group], self._num_unfinished[stream, group]
            while by_load[0][0] != load[by_load[0][1]]:  # an outdated entry
                heappop(by_load)
            dst = by_load[0][1]
            if load[src] - load[dst] >= 2 * size:
                moves[group] = dst
                load[src] -= size
                load[dst] += size
                heappush(by_load, (load[src], src))
                heappush(by_load, (load[dst], dst))
        return moves

    def move(self, stream: str, group: int, worker: int) -> None:
        """Record that a group with all its unfinished samples is now on another worker."""
        size = self._num_unfinished[stream, group]
        self._loads.add(self._home[stream, group], -size)
        self._loads.add(worker, size)
        self._home[stream, group] = worker

    def home(self, stream: str, group: int) -> int:
        """Return the worker that holds a group."""
        return self._home[stream, group]

    def is_placed(self, stream: str, group: int) -> bool:
        """Return whether a worker holds a group. None holds one for which the dataset has no row."""
        return (stream, group) in self._home

    def is_at(self, worker: int, stream: str, group: int) -> bool:
        """Return whether a worker holds a group."""
        return self._home.get((stream, group)) == worker

    def finished(self, stream: str, group: int) -> None:
        """Record that one sample of the group no longer occupies its worker."""
        self._loads.add(self._home[stream, group], -1)
        self._num_unfinished[stream, group] -= 1
        self._forget_if_empty(stream, group)

    def refused(self, stream: str, group: int, num_samples: int) -> None:
        """Record that samples of a group left the run; they may still occupy an engine."""
        self._num_waiting[stream, group] -= num_samples
        self._forget_if_empty(stream, group)

    def bound(self, stream: str, groups: Iterable[int]) -> None:
        """Record that groups are bound to a batch; a refused sample may still occupy an engine."""
        for group in groups:
            self._num_waiting[stream, group] = 0
            self._forget_if_empty(stream, group)

    def _forget_if_empty(self, stream: str, group: int) -> None:
        key = (stream, group)
        if self._num_waiting[key] == 0 and self._num_unfinished[key] == 0:
            del self._home[key], self._num_unfinished[key], self._num_waiting[key]


class _Loads:
    """The number of unfinished samples of each worker, and the lightest of each stream's workers."""

    def __init__(self, num_workers: int, streams: Iterable[tuple[int, ...]]) -> None:
        self._load = [0] * num_workers
        self._heaps = {dp_heads: [(0, dp_head) for dp_head in dp_heads] for dp_heads in streams}
        """Dp-heads of a stream, ascending -> heap of (load, dp-head), also with outdated entries."""
        self._heaps_of: dict[int, list[tuple[int, ...]]] = {}
        for dp_heads in self._heaps:
            for dp_head in dp_heads:
                self._heaps_of.setdefault(dp_head, []).append(dp_heads)

    def add(self, worker: int, num_samples: int) -> None:
        """Add samples to a worker's load."""
        self._load[worker] += num_samples
        for dp_heads in self._heaps_of.get(worker, ()):
            heap = self._heaps[dp_heads]
            heappush(heap, (self._load[worker], worker))
            if len(heap) > 4 * len(dp_heads) + 64:  # mostly outdated
                self._heaps[dp_heads] = heap = [(self._load[dp_head], dp_head) for dp_head in dp_heads]
                heapify(heap)

    def lightest(self, dp_heads: tuple[int, ...]) -> int:
        """Return the first of a stream's workers with the smallest load."""
        heap = self._heaps[dp_heads]
        while heap[0][0] != self._load[heap[0][1]]:
            heappop(heap)
        return heap[0][1]

    def by_worker(self) -> list[int]:
        """Return a copy of all loads."""
        return list(self._load)


def stream_dp_heads(plan: Plan, stream: ScheduledStream) -> tuple[int, ...]:
    """Return the engines of a generated stream; for a written stream, the dp-heads of its widest reader."""
    if stream.replicas:
        return plan.replica(stream.replicas[0]).heads
    readers = [rule.heads for rule in plan.rules if plan.graph.root_stream(rule.stream).name == stream.name]
    widest: tuple[int, ...] = max(readers, key=len, default=(0,))
    return widest
