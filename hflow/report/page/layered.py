"""The order of nodes within the columns of a layered drawing, chosen so that few edges cross.

An edge over several layers passes through a dummy node in each layer between, which keeps its path free of
nodes. Edges from one source share their dummies. Pure: equal graphs give equal drawings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

NUM_SWEEPS = 12

Columns = tuple[tuple[str, ...], ...]
"""layer -> names of nodes and dummies, top to bottom."""


@dataclass(frozen=True)
class Chain:
    """An edge as the places that it visits, one per layer: its source, dummies, its destination."""

    places: tuple[str, ...]

    @property
    def dummies(self) -> tuple[str, ...]:
        """Return the places between its ends."""
        return self.places[1:-1]


def make_chain(src: str, dst: str, layers: Mapping[str, int]) -> Chain:
    """Make the chain of an edge from one layer to a later one."""
    between = range(layers[src] + 1, layers[dst])
    return Chain((src, *(f"{src} over {layer}" for layer in between), dst))


def order_columns(layers: Mapping[str, int], chains: Sequence[Chain]) -> Columns:
    """Put nodes and dummies into columns, in an order with few crossings.

    Args:
        layers: node -> layer, from 0; nodes of a layer start in this mapping's order.
        chains: edges, each between two of the nodes.
    """
    columns = _start(layers, chains)
    arcs = list(dict.fromkeys(arc for chain in chains for arc in pairwise(chain.places)))
    best, fewest = columns, num_crossings(columns, arcs)
    for sweep in range(NUM_SWEEPS):
        columns = _exchange(_sweep(columns, arcs, forward=sweep % 2 == 0), arcs)
        crossings = num_crossings(columns, arcs)
        if crossings < fewest:
            best, fewest = columns, crossings
    return best


def num_crossings(columns: Columns, arcs: Iterable[tuple[str, str]]) -> int:
    """Count pairs of arcs that cross between two neighbouring columns."""
    at = _places(columns)
    by_layer: dict[int, list[tuple[int, int]]] = {}
    for src, dst in arcs:
        by_layer.setdefault(at[src][0], []).append((at[src][1], at[dst][1]))
    return sum(
        (a - c) * (b - d) < 0
        for ends in by_layer.values()
        for i, (a, b) in enumerate(ends)
        for c, d in ends[:i]
    )


def _start(layers: Mapping[str, int], chains: Sequence[Chain]) -> Columns:
    columns: list[list[str]] = [[] for _ in range(max(layers.values(), default=-1) + 1)]
    for name, layer in layers.items():
        columns[layer].append(name)
    for chain in chains:
        for offset, dummy in enumerate(chain.dummies, layers[chain.places[0]] + 1):
            columns[offset].append(dummy)
    return tuple(tuple(dict.fromkeys(column)) for column in columns)


def _places(columns: Columns) -> dict[str, tuple[int, int]]:
    return {name: (layer, i) for layer, column in enumerate(columns) for i, name in enumerate(column)}


def _sweep(columns: Columns, arcs: Sequence[tuple[str, str]], forward: bool) -> Columns:
    """Sort each column by the mean position of its neighbours in the column sorted before it."""
    neighbours: dict[str, list[str]] = {}
    for src, dst in arcs:
        fixed, moved = (src, dst) if forward else (dst, src)
        neighbours.setdefault(moved, []).append(fixed)
    sorted_ones = list(columns)
    for layer in range(len(columns)) if forward else reversed(range(len(columns))):
        at = {name: i for name, (_, i) in _places(tuple(sorted_ones)).items()}
        sorted_ones[layer] = tuple(
            sorted(sorted_ones[layer], key=lambda name: _mean([at[n] for n in neighbours.get(name, [name])]))
        )
    return tuple(sorted_ones)


def _exchange(columns: Columns, arcs: Sequence[tuple[str, str]]) -> Columns:
    """Swap neighbours as long as that saves crossings."""
    fewest = num_crossings(columns, arcs)
    improved = True
    while improved:
        improved = False
        for layer, column in enumerate(columns):
            for i in range(len(column) - 1):
                swapped = (*column[:i], column[i + 1], column[i], *column[i + 2 :])
                tried = (*columns[:layer], swapped, *columns[layer + 1 :])
                crossings = num_crossings(tried, arcs)
                if crossings < fewest:
                    columns, column, fewest, improved = tried, swapped, crossings, True
    return columns


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers)
