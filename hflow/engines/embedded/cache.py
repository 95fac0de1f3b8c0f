"""The KV cache, and the slots of running sequences in it.

Sequences are sorted into length bands: a band's sequences have lengths between the same two powers of two.
Bands occupy consecutive slots, longest first, so attention of each band is computed over a view of the cache
that is as long as the band's longest sequence. With a long tail of lengths, computing all sequences over the
longest length would cost several times more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int64]

_LENGTH_STEP = 16


def padded_length(num_tokens: int) -> int:
    """Round a length up to one that attention is computed over: a multiple of 16, and at least 32.

    Over such lengths the masked tail adds exact zeros in the same summation order, so a sequence's result
    does not depend on the lengths of other sequences.
    """
    return max(2 * _LENGTH_STEP, -(-num_tokens // _LENGTH_STEP) * _LENGTH_STEP)


class KVCache:
    """Keys and values of the running sequences.

    Each layer has two tensors `[slots, kv_heads, length, head_dim]`. Running sequences have slots 0 .. n-1,
    so that a decode step reads views. A layer is allocated when it is first written, with the shape and dtype
    of its keys, so the cache does not depend on the architecture. Unwritten entries are zero, since a masked
    NaN would still be NaN.

    Attributes:
        num_moves: how often its tensors have got other addresses.
    """

    def __init__(self, max_slots: int) -> None:
        self.num_moves = 0
        self._max_slots = max_slots
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._num_slots = 0
        self._length = 0

    @property
    def num_layers(self) -> int:
        """Number of layers written so far."""
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for `num_slots` sequences of `length` tokens, keeping the content."""
        if num_slots <= self._num_slots and length <= self._length:
            return
        if num_slots > self._num_slots:
            self._num_slots = max(num_slots, min(2 * self._num_slots, self._max_slots))
        if length > self._length:
            self._length = padded_length(max(length, self._length * 5 // 4))
        self.num_moves += 1
        for index, (keys, values) in self._layers.items():
            self._layers[index] = (self._enlarged(keys), self._enlarged(values))

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows `[N, kv_heads, head_dim]` at `(slots[i], positions[i])`."""
        if layer not in self._layers:
            self._layers[layer] = (self._allocate(keys), self._allocate(values))
        cached_keys, cached_values = self._layers[layer]
        cached_keys[slots, :, positions] = keys
        cached_values[slots, :, positions] = values

    def view(self, layer: int, first: int, last: int, length: int | None) -> tuple[Tensor, Tensor]:
        """Return views `[last - first, kv_heads, length, head_dim]` of slots `first .. last - 1`.

        Args:
            layer: index of the layer.
            first: the first slot.
            last: the slot after the last one.
            length: tokens of each slot; None for all.
        """
        keys, values = self._layers[layer]
        return keys[first:last, :, :length], values[first:last, :, :length]

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` tokens of slots to others, all at once; the two may overlap."""
        for layer in self._layers.values():
            for tensor in layer:
                tensor[targets, :, :length] = tensor[sources, :, :length]

    def drop(self) -> None:
        """Free everything."""
        self.num_moves += 1
        self._layers = {}
        self._num_slots = self._length = 0

    def _allocate(self, like: Tensor) -> Tensor:
        _, kv_heads, head_dim = like.shape
        return like.new_zeros(self._num_slots, kv_heads, self._length, head_dim)

    def _enlarged(self, old: Tensor) -> Tensor:
        num_slots, kv_heads, length, head_dim = old.shape
        new = old.new_zeros(self._num_slots, kv_heads, self._length, head_dim)
        new[:num_slots, :, :length] = old
        return new


_BAND_ENDS = padded_length(1) * 2 ** np.arange(32)
"""Band -> the largest length in it."""
_LARGEST_LENGTHS = frozenset(_BAND_ENDS.tolist())  # host: numpy


class LengthBand(NamedTuple):
    """Sequences in slots `first .. last - 1`, which attend over `length` tokens."""

    first: int
    last: int
    length: int


def outgrows_band(length: int) -> bool:
    """Return whether a sequence has just become too long for its band."""
    return length - 1 in _LARGEST_LENGTHS


def assign_slots(slots: Ints, lengths: Ints) -> Ints:
    """Assign n sequences to slots 0 .. n-1, longer bands first, moving as few as possible.

    Args:
        slots: `[n]`, the current slots.
        lengths: `[n]`, tokens of each sequence.

    Returns:
        `[n]`, the new slots.
    """
    band = _band(lengths)
    band_of_slot = np.sort(band)[::-1]
    """Slot -> band of the sequence to put there."""
    stays = slots < len(slots)
    stays[stays] = band_of_slot[slots[stays]] == band[stays]
    is_free = np.ones(len(slots), np.bool_)
    is_free[slots[stays]] = False
    movers = np.flatnonzero(~stays)
    assigned = slots.copy()
    assigned[movers[np.argsort(-band[movers], kind="stable")]] = np.flatnonzero(is_free)
    return assigned


def length_bands(lengths: Ints) -> Iterator[LengthBand]:
    """Yield the bands of sequences that are ordered by slot."""
    band = _band(lengths)
    starts = [0, *(np.flatnonzero(np.diff(band)) + 1).tolist(), len(band)]
    for first, last in pairwise(starts):
        if first < last:
            yield LengthBand(first, last, padded_length(int(lengths[first:last].max())))


def _band(lengths: Ints) -> Ints:
    band: Ints = np.searchsorted(_BAND_ENDS, lengths)
    return band
