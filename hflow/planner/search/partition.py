"""`Partition`: one way of dividing the replicas into groups, and its period for any seconds of its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, combinations

from hflow.planner.forecast.period import timed_graph
from hflow.planner.forecast.period.cycle_ratio import Arc, find_slower_cycle
from hflow.planner.forecast.period.step_graph import SteadyEvents
from hflow.planner.plan.rows import PUBLISH_PREFIX, Plan

Blocks = tuple[tuple[str, ...], ...]
"""Replicas by group. A replica in several groups uses the devices of all of them."""


class Partition:
    """Replicas in groups, and the order in which everything runs then.

    The period is the slowest cycle of the schedule (`planner.forecast.period`). Each cycle that was ever the
    slowest is kept: with other seconds it is a lower bound of the period, which is cheap to compute.
    """

    def __init__(self, plan: Plan, blocks: Blocks) -> None:
        self.plan = plan
        self.blocks = blocks
        self._events = SteadyEvents(plan.schedule)
        graph = timed_graph(self._events, {}, {})
        self._names = [vertex.name for vertex in graph.vertices]
        shares = {node.name: self._events.share(node) for node in self._events.nodes}
        runs = {node.name: self._events.num_executions(node) for node in self._events.sample_nodes}
        self._factors = [
            0.0 if not vertex.is_shown else shares.get(vertex.name, 1.0) * runs.get(vertex.name, 1)
            for vertex in graph.vertices
        ]
        self._arcs = graph.arcs
        self._cycles: dict[tuple[tuple[int, ...], int], None] = {}

    def bound(self, seconds: Mapping[str, float]) -> float:
        """Return a lower bound of the period."""
        spent = self._spent(seconds)
        return max((sum(spent[v] for v in cycle) / lag for cycle, lag in self._cycles), default=0.0)

    def period(self, seconds: Mapping[str, float]) -> tuple[float, tuple[str, ...]]:
        """Return the seconds of a step, and the nodes of the slowest cycle, from those of `steady_period`."""
        spent = self._spent(seconds)
        ratio = 0.0
        slowest: tuple[int, ...] = ()
        for cycle, lag in self._cycles:
            value = sum(spent[v] for v in cycle) / lag
            if value > ratio:
                ratio, slowest = value, cycle
        arcs = [Arc(arc.src, arc.dst, spent[arc.src], arc.lag, arc.why) for arc in self._arcs]
        while slower := find_slower_cycle(len(spent), arcs, ratio):
            lag = sum(arc.lag for arc in slower)
            slowest = tuple(arc.src for arc in slower)
            ratio = sum(spent[v] for v in slowest) / lag
            self._cycles[slowest, lag] = None
        return ratio, tuple(dict.fromkeys(self._names[v] for v in slowest if spent[v] > 0))

    def _spent(self, seconds: Mapping[str, float]) -> list[float]:
        return [
            seconds.get(name, 0.0) * factor for name, factor in zip(self._names, self._factors, strict=True)
        ]


def overlaps(blocks: Blocks) -> bool:
    """Return whether a replica is in several groups, so that replicas share only some of their devices."""
    names = list(chain(*blocks))
    return len(set(names)) < len(names)


@lru_cache(maxsize=4096)
def connected_blocks(blocks: Blocks) -> tuple[tuple[int, ...], ...]:
    """Return the indices of groups that have replicas in common, directly or through others."""
    parts: list[set[int]] = []
    for i, block in enumerate(blocks):
        near = [part for part in parts if any(not set(block).isdisjoint(blocks[other]) for other in part)]
        parts = [part for part in parts if part not in near] + [{i}.union(*near)]
    return tuple(sorted(tuple(sorted(part)) for part in parts))


def set_partitions(names: Sequence[str]) -> Iterator[Blocks]:
    """Yield every division of some names into non-empty blocks, the coarsest first."""
    found = sorted(_partitions(list(names)), key=len)
    yield from found


def spread_sets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the sets of replicas that may use the devices of several groups: the smallest first.

    These are a replica, the two of a model, and all engines.
    """
    models = {name: name.partition("@")[0] for name in names}
    pairs = (pair for pair in combinations(names, 2) if models[pair[0]] == models[pair[1]])
    engines = tuple(name for name in names if name.endswith("@gen"))
    yield from dict.fromkeys((name,) for name in names)
    yield from dict.fromkeys((*pairs, *([engines] if len(engines) > 1 else [])))


def _partitions(names: list[str]) -> Iterator[Blocks]:
    if not names:
        yield ()
        return
    first, rest = names[0], names[1:]
    for blocks in _partitions(rest):
        yield ((first,), *blocks)
        for i, block in enumerate(blocks):
            yield (*blocks[:i], (first, *block), *blocks[i + 1 :])


def publish(replica: str) -> str:
    """Return the name of the event in which an engine's weights are published."""
    return PUBLISH_PREFIX + replica
