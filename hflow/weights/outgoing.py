"""What a worker sends of a model's weights, slice by slice as the plan's routes say.

Each sender reads its slices from the blocks that it holds, without a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hflow.planner.ir import ClusterSpec, WeightRoute
from hflow.planner.weights.weight_slices import Receivers, WeightSlice, slices_to_keep, slices_to_send
from hflow.types.tensor_slices import Block, box_shape, intersect, numel, slices_within, whole_box
from hflow.weights.buckets import Bucket, SliceValues, pack_buckets
from hflow.weights.checksum import MODULUS, slice_checksum

if TYPE_CHECKING:
    from hflow.backends.interface import ModelBackend

AddressedSlices = Iterator[tuple[Receivers, Iterator[SliceValues]]]
"""Streams of slices, and the workers that receive each."""


def outgoing_slices(
    route: WeightRoute, cluster: ClusterSpec, worker: int, backend: ModelBackend
) -> AddressedSlices:
    """Yield what a worker sends by a route with rows. Not a collective."""
    read = _SliceReader(backend)
    for receivers, slices in slices_to_send(route, cluster, worker).items():
        yield receivers, map(read, slices)


def outgoing_tensors(receivers: Receivers, backend: ModelBackend, is_sender: bool) -> AddressedSlices:
    """Yield what one worker sends by a route without rows: whole tensors. A collective."""
    tensors = (
        SliceValues.of(WeightSlice(place, name, tuple(tensor.shape), whole_box(tuple(tensor.shape))), tensor)
        for place, (name, tensor) in enumerate(backend.weights())
    )
    if is_sender:
        yield receivers, tensors
    else:
        for _ in backend.weights():
            pass


def local_slices(route: WeightRoute, worker: int, backend: ModelBackend) -> Iterator[SliceValues]:
    """Return what a worker needs of a route and holds already."""
    return map(_SliceReader(backend), slices_to_keep(route, worker))


class OutgoingWeights:
    """Weights that a worker sends, bucket by bucket, with a checksum per receiver."""

    def __init__(self, streams: AddressedSlices) -> None:
        self._streams = streams
        self.checksums: dict[int, int] = {}
        """Receiver -> checksum of what it was sent; complete when the iteration has ended."""

    def __iter__(self) -> Iterator[tuple[Receivers, Bucket]]:
        for receivers, slices in self._streams:
            counted = ChecksummedSlices(slices)
            for bucket in pack_buckets(counted):
                yield receivers, bucket
            for receiver in receivers:
                self.checksums[receiver] = (self.checksums.get(receiver, 0) + counted.checksum) % MODULUS


class ChecksummedSlices:
    """Iterates over slices and adds up their checksum."""

    def __init__(self, slices: Iterable[SliceValues]) -> None:
        self._slices = slices
        self.checksum = 0

    def __iter__(self) -> Iterator[SliceValues]:
        for values in self._slices:
            self.checksum = (self.checksum + slice_checksum(values)) % MODULUS
            yield values


class _SliceReader:
    """Reads slices from the blocks that a rank holds, in the dtype in which weights are sent."""

    def __init__(self, backend: ModelBackend) -> None:
        self._dtype = backend.dtype
        self._blocks: dict[str, list[Block]] = {}
        for block in backend.blocks():
            self._blocks.setdefault(block.tensor, []).append(block)

    def __call__(self, piece: WeightSlice) -> SliceValues:
        blocks = self._blocks.get(piece.tensor, [])
        overlaps = [(box, block) for block in blocks if (box := intersect(block.box, piece.box)) is not None]
        assert sum(numel(box) for box, _ in overlaps) == numel(piece.box), f"{piece} is not held here"
        parts = [
            (box, block.values[slices_within(box, block.box)].to(self._dtype)) for box, block in overlaps
        ]
        if len(parts) == 1:
            return SliceValues.of(piece, parts[0][1])
        values = parts[0][1].new_empty(box_shape(piece.box))
        for box, part in parts:
            values[slices_within(box, piece.box)] = part
        return SliceValues.of(piece, values)
