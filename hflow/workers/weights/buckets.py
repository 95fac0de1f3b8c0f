"""Weights on their way between processes: slices of tensors as bytes, in buckets."""

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

from hflow.errors import RunError
from hflow.planner.weights.weight_slices import Slice
from hflow.types.tensor_slices import numel, sizes, whole, within

BUCKET_BYTES = 64 << 20
"""A bucket is closed when it is at least this large; a larger slice has one of its own."""
ALIGNMENT = 16
"""Slices start at multiples of this many bytes, so that any dtype can be viewed in place."""

Bytes = npt.NDArray[np.uint8]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size, the integers as which numpy handles entries of any dtype."""


class Content(NamedTuple):
    """A slice with its entries."""

    slice: Slice
    dtype: str
    words: npt.NDArray[Any]
    """Of the box's shape: integers of the same bits."""

    @classmethod
    def of(cls, piece: Slice, values: Tensor) -> Content:
        """Entries of a tensor of the box's shape; they may share its storage."""
        return cls(piece, str(values.dtype).removeprefix("torch."), words_of(values))


def words_of(values: Tensor) -> npt.NDArray[Any]:
    """A tensor's entries as integers of the same bits, in its storage where that is possible."""
    return values.detach().cpu().contiguous().view(_WORDS[values.dtype.itemsize]).numpy()


class BucketRow(NamedTuple):
    """Where one slice lies in a bucket's payload."""

    slice: Slice
    dtype: str
    start: int
    end: int


@dataclass(frozen=True)
class Bucket:
    """Some slices of one version of a model."""

    rows: tuple[BucketRow, ...]
    payload: Bytes

    @property
    def num_bytes(self) -> int:
        """Of the slices, without what lies between them."""
        return sum(row.end - row.start for row in self.rows)


def pack_buckets(contents: Iterable[Content], bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Group slices into buckets, holding one bucket at a time."""
    rows: list[BucketRow] = []
    parts: list[Bytes] = []
    for piece, dtype, words in contents:
        start = -(-rows[-1].end // ALIGNMENT) * ALIGNMENT if rows else 0
        rows.append(BucketRow(piece, dtype, start, start + words.nbytes))
        parts.append(words.reshape(-1).view(np.uint8))
        if rows[-1].end >= bucket_bytes:
            yield _bucket(rows, parts)
            rows, parts = [], []
    if rows:
        yield _bucket(rows, parts)


def unpack_bucket(bucket: Bucket) -> Iterator[Content]:
    """The slices of a bucket, as views of its payload."""
    for piece, dtype, start, end in bucket.rows:
        words = bucket.payload[start:end].view(f"i{getattr(torch, dtype).itemsize}")
        yield Content(piece, dtype, words.reshape(sizes(piece.box)))


def put_together(streams: Sequence[Iterable[Content]]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors out of streams of slices, each of which is in the order of the tensors.

    Of each stream no more is taken than its slices of the present tensor and one of a later one.

    Raises:
        RunError: when the slices of a tensor do not make it up.
    """
    merged = heapq.merge(*streams, key=lambda content: content.slice.place)
    for _, contents in groupby(merged, key=lambda content: content.slice.place):
        yield _tensor(list(contents))


def _tensor(contents: list[Content]) -> tuple[str, Tensor]:
    name, shape = contents[0].slice.tensor, contents[0].slice.shape
    words = np.empty(shape, contents[0].words.dtype)
    arrived = 0
    for piece, _, values in contents:
        words[within(piece.box, whole(shape))] = values
        arrived += numel(piece.box)
    if arrived != words.size:
        raise RunError(f"weights arrived incomplete: {arrived} of the {words.size} entries of {name!r}")
    return name, torch.from_numpy(words).view(getattr(torch, contents[0].dtype))


def _bucket(rows: list[BucketRow], parts: list[Bytes]) -> Bucket:
    payload = np.zeros(rows[-1].end, np.uint8)
    for row, part in zip(rows, parts, strict=True):
        payload[row.start : row.end] = part
    return Bucket(tuple(rows), payload)
