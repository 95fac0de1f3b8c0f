"""A checksum of a model's weights that does not depend on how they are sliced.

The entries of a tensor, as unsigned integers of the same bits, form a matrix: its first axis are the rows,
all others together the columns. A model's checksum is, modulo 2**64, the sum over its tensors of

    sum over rows r, columns c of  (bits[r, c] + 1) * R(r) * C(c)

R and C are odd numbers drawn from the tensor's name, shape and dtype. So the checksums of slices add up to
that of the whole model, whichever workers hold them. A change of one entry always changes the sum, because
an odd number times a number that is not 0 modulo 2**64 is not 0 either. Swapped entries, slices or tensors
change it except with a probability of about 2**-63.

Of a tensor with more than `MAX_ENTRIES` only evenly spaced rows count, the same rows for every slicing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hflow.planner.weights.weight_slices import WeightSlice
from hflow.types.tensor_slices import Box, whole_box
from hflow.weights.buckets import SliceValues, bits_of

MAX_ENTRIES = 1 << 16
"""Entries of a tensor that count, at most; but one row always counts."""
MODULUS = 1 << 64

Numbers = npt.NDArray[np.uint64]


def slice_checksum(values: SliceValues) -> int:
    """Return what a slice adds to the checksum of its model."""
    piece = values.slice
    if not values.bits.size:
        return 0
    step = _row_step(piece.shape)
    first, stop = piece.box[0] if piece.box else (0, 1)
    start = -(-first // step) * step
    bits = values.bits.reshape(stop - first, -1)[start - first :: step]
    rows = np.arange(start, stop, step, dtype=np.uint64)
    return _weighted_sum(
        piece.tensor, piece.shape, values.dtype, bits, rows, _columns(piece.shape, piece.box)
    )


def tensor_checksum(name: str, tensor: Tensor) -> int:
    """Return what a whole tensor adds to the checksum of its model. Only rows that count leave its device."""
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return 0
    step = _row_step(shape)
    counted = tensor.detach().reshape(shape[0] if shape else 1, -1)[::step]
    rows = np.arange(0, shape[0] if shape else 1, step, dtype=np.uint64)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _weighted_sum(name, shape, dtype, bits_of(counted), rows, _columns(shape, whole_box(shape)))


def box_checksum(name: str, shape: tuple[int, ...], box: Box, values: Tensor) -> int:
    """Return what a box of a tensor adds to the checksum of its model.

    Args:
        name: the tensor's.
        shape: of the whole tensor.
        box: the part of it.
        values: the entries, in the shape of the box.
    """
    return slice_checksum(SliceValues.of(WeightSlice(0, name, shape, box), values))


def weights_checksum(weights: Mapping[str, Tensor]) -> int:
    """Return the checksum of these tensors by name."""
    return sum(tensor_checksum(name, tensor) for name, tensor in weights.items()) % MODULUS


def _row_step(shape: tuple[int, ...]) -> int:
    """Return the distance between rows that count."""
    return max(1, -(-math.prod(shape) // MAX_ENTRIES))


def _columns(shape: tuple[int, ...], box: Box) -> Numbers:
    """Return the indices of a box's columns."""
    columns: Numbers = np.zeros(1, np.uint64)
    for size, (start, stop) in zip(shape[1:], box[1:], strict=True):
        indices = np.arange(start, stop, dtype=np.uint64)
        columns = np.add.outer(columns * np.uint64(size), indices).reshape(-1)
    return columns


def _weighted_sum(
    name: str, shape: tuple[int, ...], dtype: str, bits: npt.NDArray[Any], rows: Numbers, columns: Numbers
) -> int:
    if not bits.size:
        return 0
    row_key, column_key = _keys(name, shape, dtype)
    integers = bits.view(f"u{bits.dtype.itemsize}").astype(np.uint64) + np.uint64(1)
    by_row = (integers * _odd_numbers(columns, column_key)).sum(1, np.uint64)
    return int((by_row * _odd_numbers(rows, row_key)).sum(dtype=np.uint64))


@lru_cache(4096)
def _keys(name: str, shape: tuple[int, ...], dtype: str) -> tuple[int, int]:
    digest = hashlib.blake2b(repr((name, shape, dtype)).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _odd_numbers(indices: Numbers, key: int) -> Numbers:
    """Return an odd number for each index (splitmix64)."""
    z = indices * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31)) | np.uint64(1)
