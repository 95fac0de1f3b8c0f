"""How the shards of one replica become those of another: frozen rows, and the bytes that they move.

For each tensor the source's boxes are a partition, and so are the destination's; a row is the overlap of
two of them. So every entry that a worker needs is in exactly one row, and a worker that holds a row's
slice already takes it from itself: no plan can move fewer bytes. Layers are worked on as ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hflow.planner.backends import traits
from hflow.planner.ir import ClusterSpec, Replica, RouteRow, WeightRoute
from hflow.planner.model_shape import ModelShape, TensorSpec, layer_template, other_tensors
from hflow.planner.routing import rank_order
from hflow.planner.weights.sharding import Piece, is_on_stage, pieces, stage_layers
from hflow.types.tensor_slices import Box, numel

# -------------------- Where the pieces of a tensor that one replica cuts meet those that another one
# cuts.


Edges = tuple[int, int]
"""`(start, stop)` on one axis."""


@dataclass(frozen=True)
class BoxOverlap:
    """What a piece of the source and a piece of the destination have in common."""

    box: Box
    ours: int
    """Index of the source's piece."""
    theirs: int
    """Index of the destination's piece."""


@lru_cache(maxsize=256)
def overlaps(ours: tuple[Piece, ...], theirs: tuple[Piece, ...]) -> tuple[BoxOverlap, ...]:
    """All overlaps of two partitions of one tensor; none where a partition is empty."""
    left = [(piece.box, i) for i, piece in enumerate(ours)]
    right = [(piece.box, i) for i, piece in enumerate(theirs)]
    return tuple(_overlaps(left, right, ()))


def _overlaps(
    ours: Sequence[tuple[Box, int]], theirs: Sequence[tuple[Box, int]], done: Box
) -> Iterator[BoxOverlap]:
    """The overlaps of boxes that meet in the edges of the axes that are `done`.

    On either side two boxes have the same or disjoint edges on an axis, so that one pass over the sorted
    edges finds all that meet.
    """
    axis = len(done)
    if axis == len(ours[0][0]):
        yield BoxOverlap(done, ours[0][1], theirs[0][1])
        return
    left, right = _by_edges(ours, axis), _by_edges(theirs, axis)
    i = j = 0
    while i < len(left) and j < len(right):
        (start, stop), mine = left[i]
        (other_start, other_stop), others = right[j]
        edges = max(start, other_start), min(stop, other_stop)
        if edges[0] < edges[1]:
            yield from _overlaps(mine, others, (*done, edges))
        i, j = (i + 1, j) if stop <= other_stop else (i, j + 1)


def _by_edges(boxes: Sequence[tuple[Box, int]], axis: int) -> list[tuple[Edges, list[tuple[Box, int]]]]:
    """Boxes by their edges on an axis, ascending."""
    groups: dict[Edges, list[tuple[Box, int]]] = {}
    for entry in boxes:
        groups.setdefault(entry[0][axis], []).append(entry)
    return sorted(groups.items())


# -------------------- Distinct sets of workers under short names, and how two of them lie to each other.


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


def with_rows(
    route: WeightRoute, src: Replica, dst: Replica, shape: ModelShape, item_bytes: int, cluster: ClusterSpec
) -> WeightRoute:
    """The route with its rows and bytes.

    Args:
        route: says which replicas, and how.
        src: the replica that has the weights.
        dst: the replica that gets them.
        shape: sizes of their model.
        item_bytes: bytes of one entry on the way, and at the destination.
        cluster: says which workers share a machine.

    Raises:
        PlanError: when a layout's tensor axis does not divide what it cuts.
    """
    sets = WorkerSets(cluster)
    ends = _End(src, sets), _End(dst, sets)
    rows: list[RouteRow] = []
    moved = held = crossing = 0
    for part in _parts(shape, src.layout.pipe, dst.layout.pipe):
        for row in _rows(part, *ends):
            rows.append(row)
            share = sets.share(row.holders, row.receivers)
            num_bytes = item_bytes * part.num_layers * numel(row.box)
            moved += num_bytes * share.takers
            held += num_bytes * share.owners
            crossing += num_bytes * share.far_takers
    return replace(
        route,
        worker_sets=sets.listed(),
        rows=tuple(rows),
        moved_bytes=moved,
        node_bytes=crossing,
        held_bytes=held,
    )


def senders(route: WeightRoute, index: int, cluster: ClusterSpec, layer: int = 0) -> dict[int, int]:
    """Receiver -> the worker from which it takes one layer's slice of row `index`.

    That is the receiver itself if it is a holder, else a holder on its machine, else any. Receivers with
    the same choice take turns, and the turns go on from row to row and from layer to layer, so that holders
    send about equally.
    """
    row = route.rows[index]
    holders, receivers = route.worker_sets[row.holders], route.worker_sets[row.receivers]
    near: dict[int, list[int]] = {}
    for holder in holders:
        near.setdefault(cluster.node_of(holder), []).append(holder)
    found: dict[int, int] = {}
    num_takers: Counter[int | None] = Counter()
    for receiver in receivers:
        if receiver in holders:
            found[receiver] = receiver
            continue
        node = cluster.node_of(receiver)
        choice = near.get(node, holders)
        turn = node if node in near else None
        found[receiver] = choice[(num_takers[turn] + index + layer) % len(choice)]
        num_takers[turn] += 1
    return found


@dataclass(frozen=True)
class _Part:
    """A tensor, or the same tensor of several layers, that lies on one set of stages at each end."""

    spec: TensorSpec
    layers: tuple[int, int] | None
    src_stages: tuple[int, ...]
    dst_stages: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Tensors that the part stands for."""
        return 1 if self.layers is None else self.layers[1] - self.layers[0]


def _parts(shape: ModelShape, num_src: int, num_dst: int) -> Iterator[_Part]:
    """The whole model in parts, for two numbers of pipeline stages."""
    for spec in other_tensors(shape):
        yield _Part(spec, None, _stages(spec, shape, num_src), _stages(spec, shape, num_dst))
    for s, (src_first, src_last) in enumerate(stage_layers(shape.num_layers, num_src)):
        for d, (dst_first, dst_last) in enumerate(stage_layers(shape.num_layers, num_dst)):
            layers = max(src_first, dst_first), min(src_last, dst_last)
            if layers[0] < layers[1]:
                yield from (_Part(spec, layers, (s,), (d,)) for spec in layer_template(shape))


def _stages(spec: TensorSpec, shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    return tuple(stage for stage in range(num_stages) if is_on_stage(spec, shape, stage, num_stages))


def _rows(part: _Part, src: _End, dst: _End) -> Iterator[RouteRow]:
    """A row for every slice of a part."""
    ours, theirs = src.pieces(part.spec), dst.pieces(part.spec)
    holders = [src.workers(piece, part.src_stages) for piece in ours]
    receivers = [dst.workers(piece, part.dst_stages) for piece in theirs]
    for met in overlaps(ours, theirs):
        yield RouteRow(part.spec.name, part.layers, met.box, holders[met.ours], receivers[met.theirs])


class _End:
    """One of a route's two replicas: its pieces, and the workers behind them."""

    def __init__(self, replica: Replica, sets: WorkerSets) -> None:
        self._layout = replica.layout
        self._traits = traits(replica.backend)
        self._sets = sets
        num_places, order = self._layout.data * self._layout.tensor, rank_order(replica.role)
        self._workers = [
            [
                replica.workers[self._layout.rank(order, *divmod(place, self._layout.tensor), stage)]
                for place in range(num_places)
            ]
            for stage in range(self._layout.pipe)
        ]

    def pieces(self, spec: TensorSpec) -> tuple[Piece, ...]:
        """The parts into which a tensor is cut."""
        return pieces(spec, self._traits, self._layout)

    def workers(self, piece: Piece, stages: tuple[int, ...]) -> int:
        """The index of the set of workers that have a piece on these stages."""
        return self._sets.add(self._workers[stage][place] for stage in stages for place in piece.places)
