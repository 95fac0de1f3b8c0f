"""Buckets: slices of weights as bytes, on their way between processes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hflow.planner.weights.weight_slices import WeightSlice
from hflow.types.tensor_slices import Box, box_shape, slices_within, whole_box

BUCKET_BYTES = 64 << 20
"""A bucket is closed when it is at least this large; a larger slice has one of its own."""
ALIGNMENT = 16
"""Slices start at multiples of this many bytes, so that any dtype can be viewed in place."""

Bytes = npt.NDArray[np.uint8]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an entry -> the integers as which numpy handles entries of any dtype."""


class SliceValues(NamedTuple):
    """A slice with its entries."""

    slice: WeightSlice
    dtype: str
    bits: npt.NDArray[Any]
    """The entries as integers of the same bits, in the shape of the box."""

    @classmethod
    def of(cls, piece: WeightSlice, values: Tensor) -> SliceValues:
        """Build from a tensor of the box's shape; they may share storage."""
        return cls(piece, str(values.dtype).removeprefix("torch."), bits_of(values))


def bits_of(values: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's entries as integers of the same bits, without a copy if possible."""
    return values.detach().cpu().contiguous().view(_INTEGERS[values.dtype.itemsize]).numpy()


class BucketEntry(NamedTuple):
    """Which bytes of a bucket's payload one slice takes."""

    slice: WeightSlice
    dtype: str
    start: int
    end: int


class IncomingTensor(NamedTuple):
    """A tensor of which some boxes have arrived."""

    name: str
    tensor: Tensor
    """In the shape of the whole tensor; uninitialised outside the boxes."""
    boxes: tuple[Box, ...]
    """The parts that have arrived; they do not overlap."""


@dataclass(frozen=True)
class Bucket:
    """Some slices of one version of a model."""

    entries: tuple[BucketEntry, ...]
    payload: Bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the slices, without the padding between them."""
        return sum(entry.end - entry.start for entry in self.entries)


def pack_buckets(slices: Iterable[SliceValues], bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Group slices into buckets, holding one bucket at a time."""
    entries: list[BucketEntry] = []
    parts: list[Bytes] = []
    for piece, dtype, bits in slices:
        start = -(-entries[-1].end // ALIGNMENT) * ALIGNMENT if entries else 0
        entries.append(BucketEntry(piece, dtype, start, start + bits.nbytes))
        parts.append(bits.reshape(-1).view(np.uint8))
        if entries[-1].end >= bucket_bytes:
            yield _bucket(entries, parts)
            entries, parts = [], []
    if entries:
        yield _bucket(entries, parts)


def unpack_bucket(bucket: Bucket) -> Iterator[SliceValues]:
    """Yield the slices of a bucket, as views of its payload."""
    for piece, dtype, start, end in bucket.entries:
        bits = bucket.payload[start:end].view(f"i{getattr(torch, dtype).itemsize}")
        yield SliceValues(piece, dtype, bits.reshape(box_shape(piece.box)))


def assemble_tensors(streams: Sequence[Iterable[SliceValues]]) -> Iterator[IncomingTensor]:
    """Assemble tensors from streams of slices, each in the order of the tensors.

    Reads no more of a stream than its slices of the current tensor and one of a later tensor.
    """
    merged = heapq.merge(*streams, key=lambda values: values.slice.position)
    for _, slices in groupby(merged, key=lambda values: values.slice.position):
        yield _tensor(list(slices))


def _tensor(slices: list[SliceValues]) -> IncomingTensor:
    name, shape = slices[0].slice.tensor, slices[0].slice.shape
    tensor = np.empty(shape, slices[0].bits.dtype)
    for piece, _, bits in slices:
        tensor[slices_within(piece.box, whole_box(shape))] = bits
    boxes = tuple(values.slice.box for values in slices)
    return IncomingTensor(name, torch.from_numpy(tensor).view(getattr(torch, slices[0].dtype)), boxes)


def _bucket(entries: list[BucketEntry], parts: list[Bytes]) -> Bucket:
    payload = np.zeros(entries[-1].end, np.uint8)
    for entry, part in zip(entries, parts, strict=True):
        payload[entry.start : entry.end] = part
    return Bucket(tuple(entries), payload)
