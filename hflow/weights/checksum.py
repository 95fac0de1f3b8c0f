"""A checksum of a model's weights that does not depend on how they are sliced.

The entries of a tensor, as integers of the same bits, form a matrix: its first axis are the rows, all others
together the columns. A model's checksum is, modulo 2**64, the sum over its tensors of

    T * (sum of 2 * bits[r, c]  +  sum over some rows of (bits[r, c] + 1) * R(r) * C(c))

T is an odd number drawn from the tensor's name, shape and dtype; R and C are odd numbers drawn from the
indices. So the checksums of slices add up to that of the whole model, whichever workers hold them. A change
of one entry of up to 32 bits always changes the sum, because its factor is not a multiple of 4.

The second sum depends on where an entry is: swapped entries, slices or tensors change it except with a
probability of about 2**-62. It covers up to `MAX_ENTRIES` entries of a tensor, in evenly spaced rows, the
same rows for every slicing.

Everything is computed on the device of the values; only sums leave it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hflow.types.tensor_slices import Block, Box, whole_box

MAX_ENTRIES = 1 << 16
"""Entries of a tensor whose places count, at most; but those of one row always count."""
MODULUS = 1 << 64

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an entry -> the integers as which its bits are read."""


def checksums_of(blocks: Sequence[Block]) -> list[int]:
    """Return each block's share in the checksum of its model; one transfer from the device of all."""
    sums = list(map(_block_sum, blocks))
    totals = torch.stack(sums).tolist() if sums else []  # waits: once per bucket
    return [total % MODULUS for total in totals]


def block_checksum(block: Block) -> int:
    """Return the share of a block in the checksum of its model."""
    return checksums_of([block])[0]


def weights_checksum(weights: Mapping[str, Tensor]) -> int:
    """Return the checksum of whole tensors by name."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    blocks = [Block(name, shapes[name], whole_box(shapes[name]), tensor) for name, tensor in weights.items()]
    return sum(checksums_of(blocks)) % MODULUS


def _block_sum(block: Block) -> Tensor:
    """Return the checksum of a block as a signed 64-bit integer on its device."""
    shape, box, values = block.shape, block.box, block.values
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    bits = values.detach().view(_INTEGERS[values.dtype.itemsize])
    factor = _tensor_factor(block.tensor, shape, str(values.dtype))
    total = 2 * _sum(bits)
    step = max(1, -(-math.prod(shape) // MAX_ENTRIES))
    first, stop = box[0] if box else (0, 1)
    start = -(-first // step) * step
    if start < stop:
        rows = (bits if box else bits[None])[start - first :: step]
        integers = rows.to(torch.int64).reshape(len(rows), -1)
        if bits.itemsize in (2, 4):
            integers &= (1 << 8 * bits.itemsize) - 1
        by_row = ((integers + 1) * _column_factors(shape[1:], box[1:], bits.device)).sum(1)
        total = total + (by_row * _row_factors(start, stop, step, bits.device)).sum()
    return factor * total


def _sum(bits: Tensor) -> Tensor:
    """Return the sum of integers; numpy's takes a tenth of the time of torch's on a CPU."""
    if bits.device.type != "cpu":
        return bits.sum(dtype=torch.int64)
    return torch.tensor(int(bits.numpy().sum(dtype=np.int64)))  # host: see above


@lru_cache(1024)
def _row_factors(start: int, stop: int, step: int, device: torch.device) -> Tensor:
    """Return R of rows."""
    return _odd_numbers(torch.arange(start, stop, step, device=device), 0x5851F42D4C957F2D)


@lru_cache(1024)
def _column_factors(sizes: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """Return C of a box's columns, given the sizes of all axes but the first."""
    columns = torch.zeros(1, dtype=torch.int64, device=device)
    for size, (start, stop) in zip(sizes, box, strict=True):
        indices = torch.arange(start, stop, device=device)
        columns = (columns.unsqueeze(1) * size + indices).reshape(-1)
    return _odd_numbers(columns, 0x14057B7EF767814F)


@lru_cache(4096)
def _tensor_factor(name: str, shape: tuple[int, ...], dtype: str) -> int:
    """Return T of a tensor, as a signed 64-bit integer."""
    text = repr((name, shape, dtype.removeprefix("torch.")))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest, "little") | 1)


def _odd_numbers(indices: Tensor, key: int) -> Tensor:
    """Return an odd number for each index (splitmix64, in wrapping signed integers)."""
    z = indices * _signed(0x9E3779B97F4A7C15) + _signed(key)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31) | 1


def _shifted(z: Tensor, num_bits: int) -> Tensor:
    """Shift right as if the integers were unsigned."""
    return (z >> num_bits) & ((1 << 64 - num_bits) - 1)


def _signed(number: int) -> int:
    """Return the signed 64-bit integer that is equal modulo 2**64."""
    number %= MODULUS
    return number - MODULUS if number >= MODULUS // 2 else number
