"""`GroupPlacer`: which worker each group of samples runs on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from hflow.planner.plan.rows import Plan, ScheduledStream


@dataclass(eq=False, slots=True)
class _Placed:
    """A group on a worker. Without unfinished and waiting samples, it is forgotten."""

    home: int
    num_unfinished: int
    num_waiting: int
    """Samples that are neither refused nor bound to a batch."""


class GroupPlacer:
    """Places each group on the least loaded worker of its stream; all samples of a group stay together.

    Of a plan whose runs must be equal bit for bit, a group's number decides.

    So group-level bodies and prefix caches find the whole group on one worker. A worker's load is the number
    of its unfinished samples.
    """

    def __init__(self, plan: Plan) -> None:
        self._dp_heads = {
            stream.name: np.sort(stream_dp_heads(plan, stream)) for stream in plan.schedule.streams
        }
        self._is_deterministic = plan.deterministic
        self._written = {stream.name for stream in plan.schedule.streams if not stream.replicas}
        self._load = np.zeros(plan.cluster.num_devices, np.int64)
        """[workers]: unfinished samples."""
        self._placed: dict[tuple[str, int], _Placed] = {}

    def place(self, stream: str, group: int, num_samples: int) -> int:
        """Choose a worker for a group and remember it: of several with the smallest load, the first."""
        dp_heads = self._dp_heads[stream]
        # Loads depend on timing. Where nothing is generated, there is none to balance.
        is_fixed = self._is_deterministic or stream in self._written
        worker = int(dp_heads[group % len(dp_heads) if is_fixed else self._load[dp_heads].argmin()])
        self._load[worker] += num_samples
        self._placed[stream, group] = _Placed(worker, num_samples, num_samples)
        return worker

    def rebalance_moves(self, stream: str, groups: Iterable[int]) -> dict[int, int]:
        """Return the groups that should move to a less loaded engine, each with that engine's worker.

        None moves where two runs must be equal bit for bit. Groups are in the order in which they move.
        """
        load = self._load.tolist()
        moves: dict[int, int] = {}
        if self._is_deterministic:
            return moves
        by_load = [(load[dp_head], dp_head) for dp_head in self._dp_heads[stream].tolist()]
        heapify(by_load)
        for group in groups:
            placed = self._placed[stream, group]
            src, size = placed.home, placed.num_unfinished
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
        placed = self._placed[stream, group]
        self._load[placed.home] -= placed.num_unfinished
        self._load[worker] += placed.num_unfinished
        placed.home = worker

    def home(self, stream: str, group: int) -> int:
        """Return the worker that holds a group."""
        return self._placed[stream, group].home

    def is_placed(self, stream: str, group: int) -> bool:
        """Return whether a worker holds a group. None holds one for which the dataset has no row."""
        return (stream, group) in self._placed

    def is_at(self, worker: int, stream: str, group: int) -> bool:
        """Return whether a worker holds a group."""
        placed = self._placed.get((stream, group))
        return placed is not None and placed.home == worker

    def finished(self, stream: str, group: int) -> None:
        """Record that one sample of the group no longer occupies its worker."""
        placed = self._placed[stream, group]
        self._load[placed.home] -= 1
        placed.num_unfinished -= 1
        self._forget_if_empty(stream, group, placed)

    def refused(self, stream: str, group: int, num_samples: int) -> None:
        """Record that samples of a group left the run; they may still occupy an engine."""
        placed = self._placed[stream, group]
        placed.num_waiting -= num_samples
        self._forget_if_empty(stream, group, placed)

    def bound(self, stream: str, groups: Iterable[int]) -> None:
        """Record that groups are bound to a batch; a refused sample may still occupy an engine."""
        for group in groups:
            placed = self._placed[stream, group]
            placed.num_waiting = 0
            self._forget_if_empty(stream, group, placed)

    def _forget_if_empty(self, stream: str, group: int, placed: _Placed) -> None:
        if not placed.num_waiting and not placed.num_unfinished:
            del self._placed[stream, group]


def stream_dp_heads(plan: Plan, stream: ScheduledStream) -> tuple[int, ...]:
    """Return the engines of a generated stream; for a written stream, the dp-heads of its widest reader."""
    if stream.replicas:
        return plan.replica(stream.replicas[0]).heads
    readers = [rule.heads for rule in plan.rules if plan.graph.root_stream(rule.stream).name == stream.name]
    widest: tuple[int, ...] = max(readers, key=len, default=(0,))
    return widest
