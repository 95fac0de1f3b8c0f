"""A weight route row by row: which slices of which tensors a worker sends to whom, and which it keeps.

Both ends take them tensor by tensor in one order, so that a receiver can put a tensor together from the
streams of all its senders while it holds no more than the front of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hflow.planner.ir import ClusterSpec, WeightRoute
from hflow.planner.weights.resharding import senders
from hflow.types.tensor_slices import Box

Receivers = tuple[int, ...]
"""Workers that take the same slices, ascending."""


@dataclass(frozen=True)
class Slice:
    """A box of one tensor of a model."""

    place: int
    """Of its tensor in the order in which a model's tensors travel."""
    tensor: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box


def outgoing(route: WeightRoute, cluster: ClusterSpec, worker: int) -> dict[Receivers, list[Slice]]:
    """What a worker sends, by who takes it; the slices of each are in the order of the tensors."""
    found: dict[Receivers, list[Slice]] = {}
    for index, layer, piece in _slices(route):
        if worker in route.worker_sets[route.rows[index].holders]:
            chosen = senders(route, index, cluster, layer)
            takers = tuple(sorted(r for r, s in chosen.items() if s == worker and r != worker))
            if takers:
                found.setdefault(takers, []).append(piece)
    return found


def kept(route: WeightRoute, worker: int) -> list[Slice]:
    """What a worker needs and holds already, in the order of the tensors."""
    return [
        piece
        for index, _, piece in _slices(route)
        if worker in route.worker_sets[route.rows[index].receivers]
        and worker in route.worker_sets[route.rows[index].holders]
    ]


def _slices(route: WeightRoute) -> Iterator[tuple[int, int, Slice]]:
    """Every slice with its row's index and its layer, the slices of a tensor together."""
    indices: dict[tuple[str, int], list[int]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for index, row in enumerate(route.rows):
        stops = tuple(stop for _, stop in row.box)
        shapes[row.tensor] = tuple(map(max, stops, shapes.get(row.tensor, stops)))
        for layer in range(*row.layers) if row.layers else (0,):
            indices.setdefault((row.tensor, layer), []).append(index)
    for place, ((tensor, layer), rows) in enumerate(indices.items()):
        for index in rows:
            yield index, layer, Slice(place, tensor.format(layer), shapes[tensor], route.rows[index].box)
