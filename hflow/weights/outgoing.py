"""What a worker sends of a model's weights, slice by slice as the plan's routes say.

Each sender reads its slices from the blocks that it holds, without a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.rows import WeightRoute
from hflow.planner.weights.weight_slices import Receivers, WeightSlice, slices_to_keep, slices_to_send
from hflow.shapes.model_shape import is_in_fp32
from hflow.types.tensor_slices import Block, box_shape, intersect, numel, slices_within
from hflow.weights.buckets import Slices, SliceValues, pack_buckets, whole_slices
from hflow.weights.checksum import MODULUS

if TYPE_CHECKING:
    from hflow.training.interface import ModelBackend
    from hflow.weights.buckets import Bucket

AddressedSlices = Iterator[tuple[Receivers, Slices]]
"""Streams of slices, and the workers that receive each."""


def outgoing_slices(
    route: WeightRoute, cluster: ClusterSpec, worker: int, backend: ModelBackend, to_itself: bool
) -> AddressedSlices:
    """Yield what a worker sends by a route with rows. Not a collective.

    `to_itself` says whether its own engine, in another process, receives what the worker holds.
    """
    read = _SliceReader(backend)
    for receivers, slices in slices_to_send(route, cluster, worker, to_itself).items():
        yield receivers, ((piece, read(piece)) for piece in slices)


def outgoing_tensors(receivers: Receivers, backend: ModelBackend, is_sender: bool) -> AddressedSlices:
    """Yield what one worker sends by a route without rows: whole tensors. A collective."""
    if is_sender:
        yield receivers, whole_slices(backend.weights())
    else:
        for _ in backend.weights():
            pass


def local_slices(route: WeightRoute, worker: int, backend: ModelBackend) -> Iterator[SliceValues]:
    """Yield what a worker needs of a route and holds already, while the weights are on the device."""
    read = _SliceReader(backend)
    for piece in slices_to_keep(route, worker):
        yield SliceValues.of(piece, read(piece))


class OutgoingWeights:
    """Weights that a worker sends, bucket by bucket, with a checksum per receiver."""

    def __init__(self, streams: AddressedSlices) -> None:
        self._streams = streams
        self.checksums: dict[int, int] = {}
        """Receiver -> checksum of what it was sent; complete when the iteration has ended."""
        self.num_bytes = 0
        """Bytes of the slices so far."""

    def __iter__(self) -> Iterator[tuple[Receivers, Bucket]]:
        for receivers, slices in self._streams:
            for bucket in pack_buckets(slices):
                total = sum(entry.checksum for entry in bucket.entries)
                for receiver in receivers:
                    self.checksums[receiver] = (self.checksums.get(receiver, 0) + total) % MODULUS
                self.num_bytes += bucket.num_bytes
                yield receivers, bucket


class _SliceReader:
    """Reads slices from the blocks that a rank holds, in the dtype in which weights are sent."""

    def __init__(self, backend: ModelBackend) -> None:
        self._dtype = backend.dtype
        self._blocks: dict[str, list[Block]] = {}
        for block in backend.blocks():
            self._blocks.setdefault(block.tensor, []).append(block)

    def __call__(self, piece: WeightSlice) -> Tensor:
        blocks = self._blocks.get(piece.tensor, [])
        overlaps = [(box, block) for block in blocks if (box := intersect(block.box, piece.box)) is not None]
        assert sum(numel(box) for box, _ in overlaps) == numel(piece.box), f"{piece} is not held here"
        dtype = None if is_in_fp32(piece.tensor) else self._dtype
        parts = [(box, block.values[slices_within(box, block.box)].to(dtype)) for box, block in overlaps]
        if len(parts) == 1:
            return parts[0][1]
        values = parts[0][1].new_empty(box_shape(piece.box))
        for box, part in parts:
            values[slices_within(box, piece.box)] = part
        return values
