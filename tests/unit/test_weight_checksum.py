"""Checksums of weights: independent of slicing, and changed by any difference."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.base.errors import RunError
from hflow.runtime.execution.engine_control import verify_weights
from hflow.types.tensor_slices import Block, Box
from hflow.weights.checksum import (
    MAX_ENTRIES,
    MODULUS,
    block_checksum,
    weights_checksum,
)
from hflow.workers.interface import WeightsLoaded

SHAPES = [(), (7,), (5, 3), (4, 3, 2), (1, 6), (0, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64]
LARGE = (1000, 200)
STEP = -(-1000 * 200 // MAX_ENTRIES)


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9
    return values.to(dtype)


def cut(name: str, tensor: torch.Tensor, box: Box) -> int:
    return block_checksum(Block(name, tuple(tensor.shape), box, tensor[tuple(slice(*edge) for edge in box)]))


def tensor_checksum(name: str, tensor: torch.Tensor) -> int:
    return weights_checksum({name: tensor})


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A partition of a tensor into boxes, in any order."""
    boxes: list[Box] = [()]
    for size in shape:
        inner = draw(st.lists(st.integers(1, max(1, size - 1)), unique=True, max_size=3))
        edges = sorted({0, size, *(edge for edge in inner if edge < size)})
        parts = list(pairwise(edges)) if size else [(0, 0)]
        boxes = [(*box, part) for box in boxes for part in parts]
    return draw(st.permutations(boxes))


def test_a_known_answer():
    """By a second implementation, in Python's own numbers."""
    tensor = torch.tensor([[1.0, -2.0], [0.0, 0.5]], dtype=torch.bfloat16)
    assert tensor_checksum("w", tensor) == plainly("w", tensor)
    assert tensor_checksum("w", numbers(LARGE)) == plainly("w", numbers(LARGE), STEP)
    assert f"{tensor_checksum('w', tensor):016x}" == "794634d482316b48"


def plainly(name: str, tensor: torch.Tensor, step: int = 1) -> int:
    import hashlib

    text = repr((name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
    factor = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1

    def odd(index: int, key: int) -> int:
        z = (index * 0x9E3779B97F4A7C15 + key) % MODULUS
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
        z = (z ^ z >> 27) * 0x94D049BB133111EB % MODULUS
        return (z ^ z >> 31) | 1

    bits = tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32).tolist()
    mask = (1 << 8 * tensor.dtype.itemsize) - 1
    columns = [odd(c, 0x14057B7EF767814F) for c in range(len(bits[0]))]
    total = 2 * sum(map(sum, bits))
    for r in range(0, len(bits), step):
        row = odd(r, 0x5851F42D4C957F2D)
        total += sum(((x & mask) + 1) * row * columns[c] for c, x in enumerate(bits[r]))
    return factor * total % MODULUS


@settings(max_examples=100)
@given(st.data(), st.sampled_from(SHAPES), st.sampled_from(DTYPES))
def test_parts_add_up_however_a_tensor_is_cut(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype
):
    tensor = numbers(shape, dtype)
    parts = [cut("w", tensor, box) for box in data.draw(tilings(shape))]
    assert sum(parts) % MODULUS == tensor_checksum("w", tensor)


@settings(max_examples=30)
@given(st.data())
def test_parts_of_a_large_tensor_count_the_same_rows(data: st.DataObject):
    tensor = numbers(LARGE)
    parts = [cut("w", tensor, box) for box in data.draw(tilings(LARGE))]
    assert sum(parts) % MODULUS == tensor_checksum("w", tensor)


@settings(max_examples=100)
@given(st.integers(0, 999), st.integers(0, 199), st.integers(0, 31))
def test_any_bit_counts(row: int, column: int, bit: int):
    words = numbers(LARGE).numpy().copy()
    before = tensor_checksum("w", torch.from_numpy(words))
    words.view(np.uint32)[row, column] ^= 1 << bit
    assert tensor_checksum("w", torch.from_numpy(words)) != before


def test_swapped_values_change_the_checksum():
    one, other = numbers((4, 6)), numbers((4, 6), seed=1)
    plain = weights_checksum({"a": one, "b": other})
    assert plain == weights_checksum({"b": other, "a": one})
    assert plain != weights_checksum({"a": other, "b": one})
    for swapped in (one.flip(0), one.flip(1), one.flip(0).flip(1), torch.roll(one, 1, 0), one.reshape(6, 4)):
        assert tensor_checksum("a", swapped) != tensor_checksum("a", one)
    diagonal = torch.eye(2)
    assert tensor_checksum("a", diagonal) != tensor_checksum("a", diagonal.flip(0))


def test_missing_zeros_change_the_checksum():
    zeros = torch.zeros(4, 6)
    assert cut("a", zeros, ((0, 4), (0, 6))) != cut("a", zeros, ((0, 3), (0, 6)))
    assert weights_checksum({"a": zeros}) != weights_checksum({})


def test_dtype_and_shape_count():
    zeros = torch.zeros(4, 6)
    other = [zeros.bfloat16(), zeros.view(6, 4), zeros.view(2, 12)]
    assert len({tensor_checksum("a", x) for x in (zeros, *other)}) == 4


def test_a_version_is_committed_when_all_ranks_hold_its_weights():
    assert verify_weights("actor@gen", 3, WeightsLoaded()) is None
    assert verify_weights("actor@gen", 3, WeightsLoaded(8, (255, 255), (255, 255))) == "00000000000000ff"
    message = (
        "weights of version 3: their checksum was 0{14}ff when they were sent, but is 0{14}fe in the engine"
    )
    with pytest.raises(RunError, match=f"actor@gen does not hold the {message}"):
        verify_weights("actor@gen", 3, WeightsLoaded(8, (255, 255), (255, 254)))
