"""On which workers the samples of a batch come to lie, as the run's dispatcher would place them.

A generated group goes to the engine with the fewest unfinished samples; groups of a written stream
take turns. Time is counted in tokens: all running sequences of all engines draw one each at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hflow.graph.ir import Graph
from hflow.planner.ir import Plan, ScheduledStream
from hflow.planner.node_order import root_stream
from hflow.planner.request import PlanRequest


def sample_homes(
    plan: Plan, request: PlanRequest, stream: ScheduledStream, responses: Sequence[int]
) -> list[int]:
    """The worker that each sample of one batch is made on.

    Args:
        plan: names the engines, or for a written stream the ranks that train on it.
        request: bounds of the engines.
        stream: the root stream.
        responses: tokens of each sample's response; `group_size` neighbours are a group.
    """
    size = stream.group_size
    num_groups = len(responses) // size
    if stream.replicas:
        replica = plan.replica(stream.replicas[0])
        dispatcher = _Dispatcher(
            replica.heads, request.model(replica.model).max_running, request.schedule.max_concurrent
        )
        groups = [dispatcher.place(responses[g * size : (g + 1) * size]) for g in range(num_groups)]
    else:
        heads = _readers(plan, stream.name)
        groups = [heads[g % len(heads)] for g in range(num_groups)]
    return [worker for worker in groups for _ in range(size)]


def _readers(plan: Plan, stream: str) -> tuple[int, ...]:
    """Heads of the widest node that reads a stream."""
    heads = [rule.heads for rule in plan.rules if root_name(plan.graph, rule.stream) == stream]
    return max(heads, key=len, default=(0,))


def root_name(graph: Graph, stream: str) -> str:
    """The dataset-fed stream whose samples a stream has."""
    return root_stream(graph, graph.node(graph.stream(stream).source)).name


class _Dispatcher:
    """Sends groups to engines, the next as soon as `max_concurrent` permits."""

    def __init__(self, heads: Sequence[int], slots: int, max_concurrent: int) -> None:
        self._slots = slots
        self._max_concurrent = max_concurrent
        self._load = dict.fromkeys(heads, 0)
        self._least = [(0, head) for head in sorted(self._load)]
        """Heap of (load, head); an entry whose load is no longer the head's is stale."""
        self._busy: dict[int, list[int]] = {head: [] for head in heads}
        """Head -> when each of its slots is free."""
        self._ends: list[tuple[int, int]] = []
        """Heap of (when, head) of all samples in flight."""
        self._now = 0

    def place(self, responses: Sequence[int]) -> int:
        """Choose the engine of a group, and run its samples there."""
        while len(self._ends) + len(responses) > self._max_concurrent:
            self._now, head = heapq.heappop(self._ends)
            self._change(head, -1)
        while self._load[self._least[0][1]] != self._least[0][0]:
            heapq.heappop(self._least)
        head = self._least[0][1]
        self._change(head, len(responses))
        for response in responses:
            end = self._start(head) + response
            heapq.heappush(self._busy[head], end)
            heapq.heappush(self._ends, (end, head))
        return head

    def _start(self, head: int) -> int:
        """When a sample that comes now has a slot; takes the slot."""
        busy = self._busy[head]
        return self._now if len(busy) < self._slots else max(self._now, heapq.heappop(busy))

    def _change(self, head: int, by: int) -> None:
        self._load[head] += by
        heapq.heappush(self._least, (self._load[head], head))
