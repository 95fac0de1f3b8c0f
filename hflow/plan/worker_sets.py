"""Distinct sets of workers under short names, and how two of them lie to each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hflow.plan.ir import ClusterSpec


@dataclass(frozen=True)
class Share:
    """How many receivers of a slice hold it, take it from another worker, and do so across machines."""

    owners: int
    takers: int
    far_takers: int


class WorkerSets:
    """Distinct sets of workers, by index."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self._cluster = cluster
        self._index: dict[tuple[int, ...], int] = {}
        self._sets: list[frozenset[int]] = []
        self._nodes: list[Counter[int]] = []
        self._shares: dict[tuple[int, int], Share] = {}

    def add(self, workers: Iterable[int]) -> int:
        """The index of a set."""
        distinct = frozenset(workers)
        index = self._index.setdefault(tuple(sorted(distinct)), len(self._sets))
        if index == len(self._sets):
            self._sets.append(distinct)
            self._nodes.append(Counter(map(self._cluster.node_of, distinct)))
        return index

    def listed(self) -> tuple[tuple[int, ...], ...]:
        """All sets, by index."""
        return tuple(self._index)

    def share(self, holders: int, receivers: int) -> Share:
        """Who of the receivers takes a slice from whom."""
        key = holders, receivers
        if key not in self._shares:
            num = len(self._sets[receivers])
            owners = len(self._sets[receivers] & self._sets[holders])
            near = sum(self._nodes[receivers][node] for node in self._nodes[holders])
            self._shares[key] = Share(owners, num - owners, num - near)
        return self._shares[key]
