"""What travels between workers, row by row as the plan says: samples of stores, and weights of replicas.

Samples: one packed batch a stream, with bare field names. Weights: each sender cuts its slices out of the
blocks that it holds, without any collective; each receiver puts tensors together, with what it holds itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from hflow.backends.base import ModelBackend
from hflow.data.batch import Batch
from hflow.plan.ir import ClusterSpec, WeightRoute
from hflow.plan.slices import Receivers, Slice, kept, outgoing
from hflow.types.boxes import Block, meet, numel, sizes, whole, within
from hflow.workers.base import Move
from hflow.workers.store import Store
from hflow.workers.weights import Bucket, Content, pack_buckets, put_together, unpack_bucket

Parcel = Mapping[str, Batch]
"""stream -> the moved fields of its samples."""


# --------------------------------------------------------------------------------- samples
def pack(store: Store, samples: Sequence[int], fields: Iterable[str]) -> dict[str, Batch]:
    """Pack `stream/field` names of samples, stream by stream."""
    by_stream: dict[str, list[str]] = {}
    for name in fields:
        by_stream.setdefault(name.partition("/")[0], []).append(name)
    return {stream: store.gather(stream, names, samples) for stream, names in by_stream.items()}


def unpack(store: Store, parcel: Parcel) -> int:
    """Put a parcel's fields into a store; returns its bytes."""
    for stream, batch in parcel.items():
        store.put(stream, batch)
    return sum(batch.nbytes for batch in parcel.values())


Wanted = list[tuple[tuple[int, ...], tuple[str, ...]]]
"""(samples, fields) of each parcel."""


def by_ends(moves: Iterable[Move]) -> dict[int, dict[int, Wanted]]:
    """Destination -> source -> what it pulls from there: one message to each of them."""
    pairs: dict[int, dict[int, Wanted]] = {}
    for move in moves:
        pairs.setdefault(move.dst, {}).setdefault(move.src, []).append((move.samples, move.fields))
    return pairs


# --------------------------------------------------------------------------------- weights
def sent_slices(
    route: WeightRoute, cluster: ClusterSpec, worker: int, backend: ModelBackend
) -> Iterator[tuple[Receivers, Bucket]]:
    """What a worker sends by a route with rows, bucket by bucket, and who takes it; not a collective."""
    cut = _Cutter(backend)
    for receivers, slices in outgoing(route, cluster, worker).items():
        for bucket in pack_buckets(map(cut, slices)):
            yield receivers, bucket


def sent_whole(
    receivers: Receivers, backend: ModelBackend, is_sender: bool
) -> Iterator[tuple[Receivers, Bucket]]:
    """What is sent by a route without rows: every tensor whole, by one worker; a collective."""
    contents = (
        Content.of(Slice(place, name, tuple(tensor.shape), whole(tuple(tensor.shape))), tensor)
        for place, (name, tensor) in enumerate(backend.weights())
    )
    if is_sender:
        for bucket in pack_buckets(contents):
            yield receivers, bucket
    else:
        for _ in backend.weights():
            pass


class Arriving:
    """Weights that reach an engine tensor by tensor, and how many bytes of them other workers sent."""

    def __init__(self, streams: Iterable[Iterable[Bucket]], own: Iterable[Content] = ()) -> None:
        """Take the buckets of each sender, opened as they are needed, and what this worker holds itself."""
        self._streams = [self._opened(stream) for stream in streams]
        self._own = own
        self.num_bytes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return put_together([*self._streams, self._own])

    def _opened(self, stream: Iterable[Bucket]) -> Iterator[Content]:
        for bucket in stream:
            self.num_bytes += bucket.num_bytes
            yield from unpack_bucket(bucket)


def own_slices(route: WeightRoute, worker: int, backend: ModelBackend) -> Iterator[Content]:
    """What a worker needs of a route and holds already."""
    return map(_Cutter(backend), kept(route, worker))


class _Cutter:
    """Cuts slices out of the blocks that a rank holds, in the dtype in which weights travel."""

    def __init__(self, backend: ModelBackend) -> None:
        self._dtype = backend.dtype
        self._blocks: dict[str, list[Block]] = {}
        for block in backend.blocks():
            self._blocks.setdefault(block.tensor, []).append(block)

    def __call__(self, piece: Slice) -> Content:
        blocks = self._blocks.get(piece.tensor, [])
        found = [(met, block) for block in blocks if (met := meet(block.box, piece.box)) is not None]
        assert sum(numel(met) for met, _ in found) == numel(piece.box), f"{piece} is not held here"
        parts = [(met, block.values[within(met, block.box)].to(self._dtype)) for met, block in found]
        if len(parts) == 1:
            return Content.of(piece, parts[0][1])
        values = parts[0][1].new_empty(sizes(piece.box))
        for met, part in parts:
            values[within(met, piece.box)] = part
        return Content.of(piece, values)
