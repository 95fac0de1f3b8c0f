"""Buckets: slices of weights as bytes on a device, on their way between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from hflow.base.errors import RunError
from hflow.planner.weights.weight_slices import WeightSlice
from hflow.types.tensor_slices import BUCKET_BYTES, Box, box_shape, slices_within, whole_box
from hflow.weights.checksum import checksums_of

ALIGNMENT = 16
"""Slices start at multiples of this many bytes, so that any dtype can be viewed in place."""


Slices = Iterator[tuple[WeightSlice, Tensor]]
"""Slices with their entries, in the order of the tensors."""


def whole_slices(tensors: Iterable[tuple[str, Tensor]]) -> Slices:
    """Yield whole tensors as slices."""
    for position, (name, tensor) in enumerate(tensors):
        shape = tuple(tensor.shape)
        yield WeightSlice(name, shape, whole_box(shape), position), tensor


StorageOf = Callable[[str], Tensor | None]
"""Returns the whole tensor of a name that an engine holds; None if it holds a part, or nothing."""


class SliceValues(NamedTuple):
    """A slice with its entries."""

    slice: WeightSlice
    values: Tensor
    """In the shape of the box, on any device. It may share storage with a model or a bucket."""
    checksum: int
    """The checksum, as in `hflow.weights.checksum`."""

    @classmethod
    def of(cls, piece: WeightSlice, values: Tensor) -> SliceValues:
        """Compute the checksum of a slice, given a tensor of the box's shape."""
        (checksum,) = checksums_of([piece.block(values)])
        return cls(piece, values, checksum)


class BucketEntry(NamedTuple):
    """Which bytes of a bucket's payload one slice takes."""

    slice: WeightSlice
    dtype: str
    start: int
    end: int
    checksum: int
    """The checksum of the slice when it was packed."""


class IncomingTensor(NamedTuple):
    """A tensor of which some boxes have arrived."""

    name: str
    tensor: Tensor
    """In the shape of the whole tensor; uninitialised outside the boxes. It may be read-only."""
    boxes: tuple[Box, ...]
    """The parts that have arrived; they do not overlap."""
    checksums: tuple[int, ...]
    """The checksum of each box."""


class BucketHeader(NamedTuple):
    """Everything of a bucket but its payload."""

    entries: tuple[BucketEntry, ...]
    version: BucketVersion | None

    def with_payload(self, payload: Tensor) -> Bucket:
        """Return the bucket."""
        return Bucket(self.entries, payload, self.version)


class BucketVersion(NamedTuple):
    """Which bucket of which version this is, where only changes are sent."""

    stream: str
    """Identifies the sender and its receivers."""
    number: int
    """Place of the bucket in its stream."""
    version: int
    num_bytes: int
    """Bytes of the whole payload."""
    base: int | None = None
    """The version to which the payload's changes apply; None: the payload is whole."""
    num_changed: int = 0
    """Words of which the payload has place (`int32`) and value: first all places, then all values."""
    word_bytes: int = 1


@dataclass(frozen=True)
class Bucket:
    """Some slices of one version of a model."""

    entries: tuple[BucketEntry, ...]
    payload: Tensor
    """Bytes, `uint8`; on the device of the weights, or in host memory after a channel that copies them."""
    version: BucketVersion | None = None
    """None where whole buckets are sent."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the slices, without the padding between them; of changes, those of the payload."""
        if self.has_changes:
            return self.payload.numel()
        return sum(entry.end - entry.start for entry in self.entries)

    @property
    def has_changes(self) -> bool:
        """Whether the payload has changes in place of slices."""
        return self.version is not None and self.version.base is not None

    @property
    def slices(self) -> list[tuple[WeightSlice, str]]:
        """The slices, with their dtypes."""
        return [(entry.slice, entry.dtype) for entry in self.entries]

    @property
    def header(self) -> BucketHeader:
        """Everything but the payload."""
        return BucketHeader(self.entries, self.version)

    def on(self, device: torch.device) -> Bucket:
        """Return the bucket with its payload on a device; the same bucket if it is there."""
        if self.payload.device == device:
            return self
        return self.copied_to(device)

    def copied_to(self, device: torch.device) -> Bucket:
        """Return the bucket with a copy of its payload on a device."""
        payload = self.payload.to(device, copy=True)  # waits: once per bucket, as its checksum does
        return replace(self, payload=payload)


def pack_buckets(
    slices: Iterable[tuple[WeightSlice, Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Copy slices into buckets on their device, holding one bucket at a time."""
    pieces: list[tuple[WeightSlice, Tensor]] = []
    end = 0
    for piece, values in slices:
        pieces.append((piece, values))
        end = _aligned(end) + values.nbytes
        if end >= bucket_bytes:
            yield _bucket(pieces)
            pieces, end = [], 0
    if pieces:
        yield _bucket(pieces)


def unpack_bucket(bucket: Bucket) -> Iterator[SliceValues]:
    """Yield the slices of a bucket, as views of its payload."""
    for entry in bucket.entries:
        yield SliceValues(entry.slice, _values(bucket.payload, entry), entry.checksum)


def verify_bucket(bucket: Bucket) -> None:
    """Check that all slices of a bucket have the values that were packed.

    Raises:
        RunError: names the first tensor that has other values.
    """
    blocks = [entry.slice.block(_values(bucket.payload, entry)) for entry in bucket.entries]
    for entry, checksum in zip(bucket.entries, checksums_of(blocks), strict=True):
        if checksum != entry.checksum:
            raise RunError(
                f"{box_text(entry.slice.box)} of {entry.slice.tensor!r} was received with checksum "
                f"{checksum:016x}, but was sent with {entry.checksum:016x}. Resume from the last checkpoint; "
                "if it happens again, choose another models.NAME.gen.transport"
            )


def assemble_tensors(
    streams: Sequence[Iterable[SliceValues]], storage: StorageOf | None = None
) -> Iterator[IncomingTensor]:
    """Assemble tensors from streams of slices, each in the order of the tensors.

    Reads no more of a stream than its slices of the current tensor and one of a later tensor. A tensor that
    is one slice is not copied. `storage` returns where the others are assembled, if shape, dtype and device
    fit.
    """
    for _, slices in groupby(_merged(streams), key=lambda values: values.slice.position):
        yield _tensor(list(slices), storage)


def _merged(streams: Sequence[Iterable[SliceValues]]) -> Iterator[SliceValues]:
    """Yield slices in the order of the tensors, those of a tensor in the order of the streams.

    `heapq.merge` would hold the first slice of the last stream, often a model's largest tensor, to the end.
    """
    iterators = [iter(stream) for stream in streams]
    heads = {index: values for index, one in enumerate(iterators) if (values := next(one, None)) is not None}
    while heads:
        index = min(heads, key=lambda index: (heads[index].slice.position, index))
        yield heads.pop(index)
        if (values := next(iterators[index], None)) is not None:
            heads[index] = values
            del values


def box_text(box: Box) -> str:
    """Return a box as Python writes it: `[0:4, 2:6]`."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _tensor(slices: list[SliceValues], storage: StorageOf | None) -> IncomingTensor:
    first = slices[0]
    name, shape = first.slice.tensor, first.slice.shape
    whole = whole_box(shape)
    if first.slice.box == whole:
        tensor = first.values
    else:
        held, values = storage and storage(name), first.values
        if held is not None and (held.shape, held.dtype, held.device) == (shape, values.dtype, values.device):
            tensor = held.detach()
        else:
            tensor = values.new_empty(shape)
        for piece, values, _ in slices:
            tensor[slices_within(piece.box, whole)] = values
    boxes, checksums = zip(*((values.slice.box, values.checksum) for values in slices), strict=True)
    return IncomingTensor(name, tensor, boxes, checksums)


def _bucket(pieces: list[tuple[WeightSlice, Tensor]]) -> Bucket:
    bounds, end = [], 0
    for _, values in pieces:
        start = _aligned(end)
        end = start + values.nbytes
        bounds.append((start, end))
    payload = torch.zeros(_aligned(end), dtype=torch.uint8, device=pieces[0][1].device)
    entries = [
        BucketEntry(piece, str(values.dtype).removeprefix("torch."), start, end, 0)
        for (piece, values), (start, end) in zip(pieces, bounds, strict=True)
    ]
    packed = [_values(payload, entry) for entry in entries]
    for target, (_, values) in zip(packed, pieces, strict=True):
        target.copy_(values)
    checksums = checksums_of([piece.block(x) for (piece, _), x in zip(pieces, packed, strict=True)])
    return Bucket(
        tuple(entry._replace(checksum=c) for entry, c in zip(entries, checksums, strict=True)), payload
    )


def _values(payload: Tensor, entry: BucketEntry) -> Tensor:
    """Return the entries of a slice as a view of a bucket's payload."""
    values: Tensor = payload[entry.start : entry.end].view(getattr(torch, entry.dtype))
    return values.view(box_shape(entry.slice.box))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
