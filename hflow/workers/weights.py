"""Weights on their way between processes: buckets of named tensors as bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hflow.errors import RunError

BUCKET_BYTES = 64 << 20
"""A bucket is closed when it is at least this large; a larger tensor has one of its own."""
ALIGNMENT = 16
"""Tensors start at multiples of this many bytes, so that any dtype can be viewed in place."""
NUM_CHECKED_BYTES = 1 << 16
"""Bytes of a bucket, evenly spread, that its checksum covers."""

NamedTensors = Iterable[tuple[str, Tensor]]
Bytes = npt.NDArray[np.uint8]


class TensorRow(NamedTuple):
    """Where one tensor lies in a bucket's payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Bucket:
    """Some tensors of one version of a model."""

    rows: tuple[TensorRow, ...]
    payload: Bytes
    checksum: int


def pack_buckets(weights: NamedTensors, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Group tensors into buckets, holding one bucket at a time."""
    rows: list[TensorRow] = []
    parts: list[Bytes] = []
    for name, tensor in weights:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        start = -(-rows[-1].end // ALIGNMENT) * ALIGNMENT if rows else 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append(TensorRow(name, dtype, tuple(tensor.shape), start, start + data.nbytes))
        parts.append(data)
        if rows[-1].end >= bucket_bytes:
            yield _bucket(rows, parts)
            rows, parts = [], []
    if rows:
        yield _bucket(rows, parts)


def unpack_bucket(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket.

    Raises:
        RunError: when the bytes are not those that were sent.
    """
    if _checksum(bucket.payload) != bucket.checksum:
        raise RunError(f"weights arrived changed: the bucket of {bucket.rows[0].name!r} has another checksum")
    writable = torch.from_numpy(bucket.payload.copy())
    for row in bucket.rows:
        yield row.name, writable[row.start : row.end].view(getattr(torch, row.dtype)).view(row.shape)


def _bucket(rows: list[TensorRow], parts: list[Bytes]) -> Bucket:
    payload = np.zeros(rows[-1].end, np.uint8)
    for row, part in zip(rows, parts, strict=True):
        payload[row.start : row.end] = part
    return Bucket(tuple(rows), payload, _checksum(payload))


def _checksum(payload: Bytes) -> int:
    stride = max(1, len(payload) // NUM_CHECKED_BYTES)
    return zlib.crc32(payload[::stride].tobytes())
