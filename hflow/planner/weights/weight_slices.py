"""The slices of a weight route: which parts of which tensors a worker sends, and which it keeps.

Sender and receiver process slices in the same order of tensors. So a receiver can build each tensor from the
streams of all its senders while it holds only the front of each stream.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.rows import WeightRoute
from hflow.planner.weights.resharding import senders
from hflow.types.tensor_slices import TensorBox

Receivers = tuple[int, ...]
"""Workers that take the same slices, ascending."""


@dataclass(frozen=True)
class WeightSlice(TensorBox):
    """A box of a tensor that is sent."""

    position: int
    """The index of its tensor in the sequence in which a model's tensors are sent."""


def slices_to_send(
    route: WeightRoute, cluster: ClusterSpec, worker: int, to_itself: bool = False
) -> dict[Receivers, list[WeightSlice]]:
    """Return the slices that a worker sends, by receivers; they are in the order of the tensors.

    Args:
        to_itself: whether it also sends what it needs itself, for an engine in a process of its own. If the
            route has a transport for that, these slices have no other receivers.
    """
    by_receivers: dict[Receivers, list[WeightSlice]] = {}
    for index, layer, weight_slice in _slices(route):
        if worker in route.worker_sets[route.rows[index].holders]:
            sender_of = senders(route, index, cluster, layer)
            receivers = tuple(
                sorted(r for r, s in sender_of.items() if s == worker and (to_itself or r != worker))
            )
            for part in _apart(receivers, worker) if route.near else (receivers,):
                if part:
                    by_receivers.setdefault(part, []).append(weight_slice)
    return by_receivers


def _apart(receivers: Receivers, worker: int) -> tuple[Receivers, Receivers]:
    """Return a worker, if it is among receivers, and the others."""
    others = tuple(receiver for receiver in receivers if receiver != worker)
    return receivers if receivers == (worker,) else (worker,) * (len(others) < len(receivers)), others


def streams(route: WeightRoute, cluster: ClusterSpec) -> frozenset[tuple[int, Receivers]]:
    """Return the sender and the receivers of all streams of a route, other than from a worker to itself."""
    found: set[tuple[int, Receivers]] = set()
    for index, row in enumerate(route.rows):
        holders = route.worker_sets[row.holders]
        repeats = math.lcm(len(holders), *cluster.machines(holders).values())
        first, last = row.layers or (0, 1)
        for layer in range(first, min(last, first + repeats)):
            receivers_of: dict[int, list[int]] = {}
            for receiver, sender in senders(route, index, cluster, layer).items():
                if receiver != sender:
                    receivers_of.setdefault(sender, []).append(receiver)
            found.update((sender, tuple(sorted(several))) for sender, several in receivers_of.items())
    return frozenset(found)


def relays(
    streams: Iterable[tuple[int, Receivers]], cluster: ClusterSpec
) -> dict[tuple[int, Receivers], int]:
    """Return the receiver that takes a stream from its sender and broadcasts it to the others.

    Streams that are left out are broadcast by their sender: those with one receiver, and those whose
    receivers have no other sender. It is a receiver on the sender's machine, if there is one, and another one
    for each sender.
    """
    senders_of = Counter(receivers for _, receivers in streams)
    found = {}
    for sender, receivers in streams:
        if len(receivers) > 1 and senders_of[receivers] > 1:
            node = cluster.node_of(sender)
            near = [receiver for receiver in receivers if cluster.node_of(receiver) == node] or receivers
            found[sender, receivers] = near[sender % len(near)]
    return found


def slices_to_keep(route: WeightRoute, worker: int) -> list[WeightSlice]:
    """Return the slices that a worker needs and already holds, in the order of the tensors."""
    return [
        weight_slice
        for index, _, weight_slice in _slices(route)
        if worker in route.worker_sets[route.rows[index].receivers]
        and worker in route.worker_sets[route.rows[index].holders]
    ]


def _slices(route: WeightRoute) -> Iterator[tuple[int, int, WeightSlice]]:
    """Yield every slice with the index of its row and its layer; the slices of a tensor are consecutive."""
    indices: dict[tuple[str, int], list[int]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for index, row in enumerate(route.rows):
        stops = tuple(stop for _, stop in row.box)
        shapes[row.tensor] = tuple(map(max, stops, shapes.get(row.tensor, stops)))
        for layer in range(*row.layers) if row.layers else (0,):
            indices.setdefault((row.tensor, layer), []).append(index)
    for position, ((tensor, layer), rows) in enumerate(indices.items()):
        for index in rows:
            box = route.rows[index].box
            yield index, layer, WeightSlice(tensor.format(layer), shapes[tensor], box, position)
