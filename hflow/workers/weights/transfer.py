"""What travels between workers, row by row as the plan says: samples of stores, and weights of replicas.

Samples: one packed batch a stream, with bare field names. Weights: each sender cuts its slices out of the
blocks that it holds, without any collective; each receiver puts tensors together, with what it holds itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from hflow.backends.interface import ModelBackend
from hflow.data.batch import Batch
from hflow.planner.data.redistribute import Move
from hflow.planner.ir import ClusterSpec, WeightRoute
from hflow.planner.weights.weight_slices import Receivers, Slice, kept, outgoing
from hflow.types.tensor_slices import Block, meet, numel, sizes, whole, within
from hflow.workers.storage.sample_store import SampleStore
from hflow.workers.weights.buckets import Bucket, Content, pack_buckets, put_together, unpack_bucket
from hflow.workers.weights.checksum import MODULUS, slice_digest

Parcel = Mapping[str, Batch]
"""stream -> the moved fields of its samples."""


# --------------------------------------------------------------------------------- samples
def pack(store: SampleStore, samples: Sequence[int], fields: Iterable[str]) -> dict[str, Batch]:
    """Pack `stream/field` names of samples, stream by stream."""
    by_stream: dict[str, list[str]] = {}
    for name in fields:
        by_stream.setdefault(name.partition("/")[0], []).append(name)
    return {stream: store.gather(stream, names, samples) for stream, names in by_stream.items()}


def unpack(store: SampleStore, parcel: Parcel) -> int:
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
Addressed = Iterator[tuple[Receivers, Iterator[Content]]]
"""Contents, and who takes them."""


def sent_slices(route: WeightRoute, cluster: ClusterSpec, worker: int, backend: ModelBackend) -> Addressed:
    """What a worker sends by a route with rows; not a collective."""
    cut = _Cutter(backend)
    for receivers, slices in outgoing(route, cluster, worker).items():
        yield receivers, map(cut, slices)


def sent_whole(receivers: Receivers, backend: ModelBackend, is_sender: bool) -> Addressed:
    """What is sent by a route without rows: every tensor whole, by one worker; a collective."""
    contents = (
        Content.of(Slice(place, name, tuple(tensor.shape), whole(tuple(tensor.shape))), tensor)
        for place, (name, tensor) in enumerate(backend.weights())
    )
    if is_sender:
        yield receivers, contents
    else:
        for _ in backend.weights():
            pass


class OutgoingWeights:
    """Weights that leave a worker bucket by bucket, and what each receiver's add up to."""

    def __init__(self, contents: Addressed) -> None:
        self._contents = contents
        self.digests: dict[int, int] = {}
        """Receiver -> digest of what it was sent; complete when all has left."""

    def __iter__(self) -> Iterator[tuple[Receivers, Bucket]]:
        for receivers, contents in self._contents:
            tally = Tally(contents)
            for bucket in pack_buckets(tally):
                yield receivers, bucket
            for receiver in receivers:
                self.digests[receiver] = (self.digests.get(receiver, 0) + tally.digest) % MODULUS


class Tally:
    """Passes contents on, and adds up their digest."""

    def __init__(self, contents: Iterable[Content]) -> None:
        self._contents = contents
        self.digest = 0

    def __iter__(self) -> Iterator[Content]:
        for content in self._contents:
            self.digest = (self.digest + slice_digest(content)) % MODULUS
            yield content


class IncomingWeights:
    """Weights that reach an engine tensor by tensor, and how many bytes of them other workers sent."""

    def __init__(self, streams: Iterable[Iterable[Bucket]], own: Iterable[Content] = ()) -> None:
        """Take the buckets of each sender, opened as they are needed, and what this worker holds itself."""
        self._streams = [self._opened(stream) for stream in streams]
        self._own = Tally(own)
        self.num_bytes = 0

    @property
    def local_checksum(self) -> int:
        """Digest of what this worker holds itself; complete when all has arrived."""
        return self._own.digest

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
