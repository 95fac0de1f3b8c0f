"""The rows of a weight route: how the shards of one replica become those of another, and the bytes that move.

For each tensor the source's boxes are a partition, and so are the destination's. A row is the overlap of one
box of each. So every entry that a worker needs is in exactly one row. A worker that already holds a row's
slice does not receive it, so no other plan moves fewer bytes. Equal layers are processed as ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.routing import rank_order
from hflow.planner.plan.rows import Replica, RouteRow, WeightRoute
from hflow.planner.plan.traits import traits
from hflow.planner.weights.sharding import TensorShard, is_on_stage, tensor_shards
from hflow.shapes.layout import stage_layers
from hflow.shapes.model_shape import (
    DTYPE_BYTES,
    ModelShape,
    TensorSpec,
    equal_layers,
    is_in_fp32,
    layer_template,
    other_tensors,
)
from hflow.types.tensor_slices import Box, numel

Bounds = tuple[int, int]
"""`(start, stop)` on one axis."""


def add_rows(
    route: WeightRoute, src: Replica, dst: Replica, shape: ModelShape, item_bytes: int, cluster: ClusterSpec
) -> WeightRoute:
    """Return a route with its rows and the bytes that they move.

    `item_bytes` are those of one entry while it moves, and at the destination.

    Raises:
        PlanError: if the tensor axis of a layout does not divide a tensor that it splits.
    """
    sets = WorkerSets(cluster)
    ends = _RouteEnd(src, sets), _RouteEnd(dst, sets)
    rows: list[RouteRow] = []
    moved = local = crossing = 0
    for tensors in _tensor_ranges(shape, src.layout.pipe, dst.layout.pipe):
        for row in _rows(tensors, *ends):
            rows.append(row)
            counts = sets.receiver_counts(row.holders, row.receivers)
            of_item = DTYPE_BYTES["fp32"] if is_in_fp32(row.tensor) else item_bytes
            num_bytes = of_item * tensors.num_layers * numel(row.box)
            moved += num_bytes * counts.remote
            local += num_bytes * counts.local
            crossing += num_bytes * counts.cross_machine
    return replace(
        route,
        worker_sets=sets.listed(),
        rows=tuple(rows),
        moved_bytes=moved,
        node_bytes=crossing,
        held_bytes=local,
    )


def held_bytes(
    src: Replica, dst: Replica, shape: ModelShape, item_bytes: int, cluster: ClusterSpec
) -> dict[int, list[int]]:
    """Return the part of each engine rank's needs that each worker of the source holds, in bytes.

    The arguments are those of `add_rows`. It does not matter where the ranks of the destination are. Those
    with equal numbers modulo the shards of the model need the same, so they count as one. The result is
    worker -> rank modulo the number of shards -> bytes.

    Raises:
        PlanError: if the tensor axis of a layout does not divide a tensor that it splits.
    """
    num_shards = dst.layout.num_shards
    needs = replace(dst, workers=tuple(rank % num_shards for rank in range(dst.layout.world)))
    route = add_rows(WeightRoute(dst.model, src.name, dst.name, "pull"), src, needs, shape, 1, cluster)
    held = {worker: [0] * num_shards for worker in src.workers}
    for row in route.rows:
        num_layers = 1 if row.layers is None else row.layers[1] - row.layers[0]
        num_bytes = item_bytes * num_layers * numel(row.box)
        for worker in route.worker_sets[row.holders]:
            for shard in route.worker_sets[row.receivers]:
                held[worker][shard] += num_bytes
    return held


def senders(route: WeightRoute, index: int, cluster: ClusterSpec, layer: int = 0) -> dict[int, int]:
    """Return, for each receiver of row `index`, the worker from which it takes the slice of one layer.

    That is the receiver itself if it is a holder, otherwise a holder on its machine, otherwise any holder.
    Receivers with the same choice of holders take turns, which continue from row to row and from layer to
    layer, so that holders send about equally much.
    """
    row = route.rows[index]
    holders, receivers = route.worker_sets[row.holders], route.worker_sets[row.receivers]
    holders_on: dict[int, list[int]] = {}
    for holder in holders:
        holders_on.setdefault(cluster.node_of(holder), []).append(holder)
    sender_of: dict[int, int] = {}
    num_remote: Counter[int | None] = Counter()
    for receiver in receivers:
        if receiver in holders:
            sender_of[receiver] = receiver
            continue
        node = cluster.node_of(receiver)
        choice = holders_on.get(node, holders)
        turn = node if node in holders_on else None
        sender_of[receiver] = choice[(num_remote[turn] + index + layer) % len(choice)]
        num_remote[turn] += 1
    return sender_of


@dataclass(frozen=True)
class BoxOverlap:
    """The common part of one shard of the source and one shard of the destination."""

    box: Box
    src: int
    """Index of the source's shard."""
    dst: int
    """Index of the destination's shard."""


@lru_cache(maxsize=256)
def box_overlaps(src: tuple[TensorShard, ...], dst: tuple[TensorShard, ...]) -> tuple[BoxOverlap, ...]:
    """Return all overlaps of two partitions of one tensor; none if a partition is empty."""
    src_boxes = [(shard.box, i) for i, shard in enumerate(src)]
    dst_boxes = [(shard.box, i) for i, shard in enumerate(dst)]
    return tuple(_box_overlaps(src_boxes, dst_boxes, ()))


def _box_overlaps(
    src: Sequence[tuple[Box, int]], dst: Sequence[tuple[Box, int]], done: Box
) -> Iterator[BoxOverlap]:
    """Yield the overlaps of boxes that overlap by the bounds `done` on the first axes.

    On either side two boxes have equal or disjoint bounds on an axis, so one pass over the sorted bounds
    finds all overlaps.
    """
    axis = len(done)
    if axis == len(src[0][0]):
        yield BoxOverlap(done, src[0][1], dst[0][1])
        return
    src_groups, dst_groups = _by_bounds(src, axis), _by_bounds(dst, axis)
    i = j = 0
    while i < len(src_groups) and j < len(dst_groups):
        (src_start, src_stop), src_boxes = src_groups[i]
        (dst_start, dst_stop), dst_boxes = dst_groups[j]
        bounds = max(src_start, dst_start), min(src_stop, dst_stop)
        if bounds[0] < bounds[1]:
            yield from _box_overlaps(src_boxes, dst_boxes, (*done, bounds))
        i, j = (i + 1, j) if src_stop <= dst_stop else (i, j + 1)


def _by_bounds(boxes: Sequence[tuple[Box, int]], axis: int) -> list[tuple[Bounds, list[tuple[Box, int]]]]:
    """Group boxes by their bounds on an axis, ascending."""
    groups: dict[Bounds, list[tuple[Box, int]]] = {}
    for entry in boxes:
        groups.setdefault(entry[0][axis], []).append(entry)
    return sorted(groups.items())


@dataclass(frozen=True)
class ReceiverCounts:
    """Numbers of workers that receive one slice."""

    local: int
    """Receivers that already hold it."""
    remote: int
    """Receivers that take it from another worker."""
    cross_machine: int
    """Receivers that take it from another machine."""


class WorkerSets:
    """Distinct sets of workers, by index."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self._cluster = cluster
        self._index: dict[tuple[int, ...], int] = {}
        self._sets: list[frozenset[int]] = []
        self._nodes: list[Counter[int]] = []
        """For each set the number of its workers on each machine."""
        self._counts: dict[tuple[int, int], ReceiverCounts] = {}

    def add(self, workers: Iterable[int]) -> int:
        """Add a set unless it exists, and return its index."""
        distinct = frozenset(workers)
        index = self._index.setdefault(tuple(sorted(distinct)), len(self._sets))
        if index == len(self._sets):
            self._sets.append(distinct)
            self._nodes.append(Counter(map(self._cluster.node_of, distinct)))
        return index

    def listed(self) -> tuple[tuple[int, ...], ...]:
        """Return all sets, by index."""
        return tuple(self._index)

    def receiver_counts(self, holders: int, receivers: int) -> ReceiverCounts:
        """Count the receivers of a slice by where they take it from, given the indices of two sets."""
        key = holders, receivers
        if key not in self._counts:
            num = len(self._sets[receivers])
            num_local = len(self._sets[receivers] & self._sets[holders])
            num_near = sum(self._nodes[receivers][node] for node in self._nodes[holders])
            self._counts[key] = ReceiverCounts(num_local, num - num_local, num - num_near)
        return self._counts[key]


@dataclass(frozen=True)
class _TensorRange:
    """A tensor, or the same tensor of several layers, that is on one set of stages at each end."""

    spec: TensorSpec
    layers: tuple[int, int] | None
    src_stages: tuple[int, ...]
    dst_stages: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Number of tensors in the range."""
        return 1 if self.layers is None else self.layers[1] - self.layers[0]


def _tensor_ranges(shape: ModelShape, num_src: int, num_dst: int) -> Iterator[_TensorRange]:
    """Yield the whole model in ranges, for two numbers of pipeline stages."""
    for spec in other_tensors(shape):
        yield _TensorRange(spec, None, _stages(spec, shape, num_src), _stages(spec, shape, num_dst))
    for s, (src_first, src_last) in enumerate(stage_layers(shape.num_layers, num_src)):
        for d, (dst_first, dst_last) in enumerate(stage_layers(shape.num_layers, num_dst)):
            layers = max(src_first, dst_first), min(src_last, dst_last)
            if layers[0] < layers[1]:
                for run in equal_layers(shape, *layers):
                    yield from (_TensorRange(spec, run, (s,), (d,)) for spec in layer_template(shape, run[0]))


def _stages(spec: TensorSpec, shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    return tuple(stage for stage in range(num_stages) if is_on_stage(spec, shape, stage, num_stages))


def _rows(tensors: _TensorRange, src: _RouteEnd, dst: _RouteEnd) -> Iterator[RouteRow]:
    """Yield a row for every slice of a range."""
    src_shards, dst_shards = src.shards(tensors.spec), dst.shards(tensors.spec)
    holders = [src.workers(shard, tensors.src_stages) for shard in src_shards]
    receivers = [dst.workers(shard, tensors.dst_stages) for shard in dst_shards]
    for overlap in box_overlaps(src_shards, dst_shards):
        yield RouteRow(
            tensors.spec.name, tensors.layers, overlap.box, holders[overlap.src], receivers[overlap.dst]
        )


class _RouteEnd:
    """The source or destination replica of a route: the shards of its tensors, and their workers."""

    def __init__(self, replica: Replica, sets: WorkerSets) -> None:
        self._layout = replica.layout
        self._traits = traits(replica.backend)
        self._sets = sets
        order = rank_order(replica.role)
        self._workers = [
            [replica.workers[self._layout.rank(order, *at)] for at in self._layout.stage_coords(stage)]
            for stage in range(self._layout.pipe)
        ]
        """Stage -> stage rank -> worker."""

    def shards(self, spec: TensorSpec) -> tuple[TensorShard, ...]:
        """Return the shards of a tensor."""
        return tensor_shards(spec, self._traits, self._layout)

    def workers(self, shard: TensorShard, stages: tuple[int, ...]) -> int:
        """Return the index of the set of workers that have a shard on these stages."""
        return self._sets.add(self._workers[stage][rank] for stage in stages for rank in shard.stage_ranks)
