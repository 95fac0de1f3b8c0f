"""Which row a group reads, and which worker it lives on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Protocol

from hflow.planner.ir import Plan, ScheduledStream


class Rows(Protocol):
    """The order in which a stream reads its dataset: pure, so that a position can be resumed."""

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        ...

    def row(self, position: int) -> int:
        """The row at a position; positions beyond the dataset start the next epoch."""
        ...


class RowCursor:
    """Maps the group ids of one stream, which ascend, to rows.

    The trained stream goes on for ever, epoch after epoch. A side stream reads its dataset once
    per evaluation; groups beyond its end have no row.
    """

    def __init__(self, rows: Rows, endless: bool) -> None:
        self._rows = rows
        self._endless = endless
        self._base = 0
        self._next = 0

    def row(self, group: int) -> int | None:
        """The row of a group, or None where the evaluation has no more."""
        position = group - self._base
        self._next = group + 1
        if self._endless or position < self._rows.num_rows:
            return self._rows.row(position)
        return None

    def restart(self) -> None:
        """An evaluation is over: the next group reads the first row."""
        self._base = self._next


class GroupPlacer:
    """Sends each group to the least loaded of its stream's workers; its members stay together.

    Group-level bodies and prefix caches then find everything on one worker (contract 10).
    """

    def __init__(self, plan: Plan) -> None:
        self._heads = {stream.name: tuple(sorted(_heads(plan, stream))) for stream in plan.schedule.streams}
        self._written = {stream.name for stream in plan.schedule.streams if not stream.replicas}
        self._load: dict[int, int] = dict.fromkeys(range(plan.cluster.num_devices), 0)
        self._home: dict[tuple[str, int], int] = {}
        self._unfinished: dict[tuple[str, int], int] = {}
        self._waiting: dict[tuple[str, int], int] = {}
        """Samples of a group that are neither refused nor bound; without any, and with nothing of it running,
        a group is forgotten."""

    def place(self, stream: str, group: int, num_samples: int) -> int:
        """Choose a worker for a group and remember it."""
        heads = self._heads[stream]
        if stream in self._written:  # no engine to balance: the same workers whatever the timing
            worker = heads[group % len(heads)]
        else:
            worker = min(heads, key=self._load.__getitem__)
        self._load[worker] += num_samples
        self._home[stream, group] = worker
        self._unfinished[stream, group] = self._waiting[stream, group] = num_samples
        return worker

    def evened(self, stream: str, groups: Iterable[int]) -> dict[int, int]:
        """Which groups would better be on an engine that has less to do, and on which.

        Args:
            stream: theirs.
            groups: those that may move, the first to go first.
        """
        load, moves = dict(self._load), {}
        least = [(load[head], head) for head in self._heads[stream]]
        heapify(least)
        for group in groups:
            src, size = self._home[stream, group], self._unfinished[stream, group]
            while least[0][0] != load[least[0][1]]:  # it has changed since
                heappop(least)
            dst = least[0][1]
            if load[src] - load[dst] >= 2 * size:
                moves[group] = dst
                load[src] -= size
                load[dst] += size
                heappush(least, (load[src], src))
                heappush(least, (load[dst], dst))
        return moves

    def move(self, stream: str, group: int, worker: int) -> None:
        """A group with all its unfinished samples is on another worker."""
        size = self._unfinished[stream, group]
        self._load[self._home[stream, group]] -= size
        self._load[worker] += size
        self._home[stream, group] = worker

    def home(self, stream: str, group: int) -> int:
        """The worker that holds a group."""
        return self._home[stream, group]

    def finished(self, stream: str, group: int) -> None:
        """One of the group's samples no longer occupies its worker."""
        self._load[self._home[stream, group]] -= 1
        self._unfinished[stream, group] -= 1
        self._forget_finished(stream, group)

    def refused(self, stream: str, group: int, num_samples: int) -> None:
        """Samples of a group left the run; they may still occupy an engine."""
        self._waiting[stream, group] -= num_samples
        self._forget_finished(stream, group)

    def forget(self, stream: str, groups: Iterable[int]) -> None:
        """Groups that are bound to a batch; a refused member may still occupy an engine."""
        for group in groups:
            self._waiting[stream, group] = 0
            self._forget_finished(stream, group)

    def _forget_finished(self, stream: str, group: int) -> None:
        key = (stream, group)
        if self._waiting[key] == 0 and self._unfinished[key] == 0:
            del self._home[key], self._unfinished[key], self._waiting[key]


def _heads(plan: Plan, stream: ScheduledStream) -> tuple[int, ...]:
    """Engines of a generated stream; for a written one, the ranks that will train on it."""
    if stream.replicas:
        return plan.replica(stream.replicas[0]).heads
    readers = [rule.heads for rule in plan.rules if root_of(plan, rule.stream) == stream.name]
    widest: tuple[int, ...] = max(readers, key=len, default=(0,))
    return widest


def root_of(plan: Plan, stream: str) -> str:
    """The dataset-fed stream whose sample ids a stream shares; of several of one source, the first."""
    parents: Mapping[str, str | None] = {s.name: s.parent for s in plan.graph.streams}
    while (parent := parents[stream]) is not None:
        stream = parent
    source = plan.graph.stream(stream).source
    return next(s.name for s in plan.graph.streams if s.source == source)
