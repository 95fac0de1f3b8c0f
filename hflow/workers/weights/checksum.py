"""A number that says which weights these are, whatever slices they are cut into.

The entries of a tensor, as whole numbers of the same bits, are seen as a matrix: its first axis are the
rows, all others the columns. A model's digest is, modulo 2**64, the sum over its tensors of

    sum over rows r, columns c of  (bits[r, c] + 1) * R(r) * C(c)

R and C are odd numbers drawn from the tensor's name, shape and dtype. So the digests of parts add up to
that of the whole, whoever holds them; an entry that changes always changes the sum, as no odd number times
less than 2**64 is 0; and entries, slices or tensors that change places do but for a chance of about 2**-63.

Of a tensor with more than `MOST_ENTRIES` only evenly spread rows count, the same whatever part is at hand.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hflow.types.tensor_slices import Box, whole
from hflow.workers.weights.buckets import Content, words_of

MOST_ENTRIES = 1 << 16
"""Entries of a tensor that count, at most, but for the one row that always does."""
MODULUS = 1 << 64

Numbers = npt.NDArray[np.uint64]


def slice_digest(content: Content) -> int:
    """What a slice adds to the digest of its model."""
    piece = content.slice
    if not content.words.size:
        return 0
    step = _step(piece.shape)
    first, stop = piece.box[0] if piece.box else (0, 1)
    start = -(-first // step) * step
    words = content.words.reshape(stop - first, -1)[start - first :: step]
    rows = np.arange(start, stop, step, dtype=np.uint64)
    return _sum(piece.tensor, piece.shape, content.dtype, words, rows, _columns(piece.shape, piece.box))


def tensor_digest(name: str, tensor: Tensor) -> int:
    """What a whole tensor adds to the digest of its model; only what counts leaves its device."""
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return 0
    step = _step(shape)
    counted = tensor.detach().reshape(shape[0] if shape else 1, -1)[::step]
    rows = np.arange(0, shape[0] if shape else 1, step, dtype=np.uint64)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _sum(name, shape, dtype, words_of(counted), rows, _columns(shape, whole(shape)))


def digest_of(weights: Mapping[str, Tensor], names: Iterable[str]) -> int:
    """The digest of these tensors."""
    return sum(tensor_digest(name, weights[name]) for name in names) % MODULUS


def _step(shape: tuple[int, ...]) -> int:
    """Every how many rows one counts."""
    return max(1, -(-math.prod(shape) // MOST_ENTRIES))


def _columns(shape: tuple[int, ...], box: Box) -> Numbers:
    """The columns of a box."""
    columns: Numbers = np.zeros(1, np.uint64)
    for size, (start, stop) in zip(shape[1:], box[1:], strict=True):
        here = np.arange(start, stop, dtype=np.uint64)
        columns = np.add.outer(columns * np.uint64(size), here).reshape(-1)
    return columns


def _sum(
    name: str, shape: tuple[int, ...], dtype: str, words: npt.NDArray[Any], rows: Numbers, columns: Numbers
) -> int:
    if not words.size:
        return 0
    of_rows, of_columns = _keys(name, shape, dtype)
    bits = words.view(f"u{words.dtype.itemsize}").astype(np.uint64) + np.uint64(1)
    by_row = (bits * _odd(columns, of_columns)).sum(1, np.uint64)
    return int((by_row * _odd(rows, of_rows)).sum(dtype=np.uint64))


@lru_cache(4096)
def _keys(name: str, shape: tuple[int, ...], dtype: str) -> tuple[int, int]:
    digest = hashlib.blake2b(repr((name, shape, dtype)).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _odd(indices: Numbers, key: int) -> Numbers:
    """An odd number for each index (splitmix64)."""
    z = indices * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31)) | np.uint64(1)
