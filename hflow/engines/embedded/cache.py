"""The KV cache of the running sequences: what all layouts have, and the layout of a CPU, slots.

A sequence has a slot on a CPU, and pages on an accelerator (`pages.py`).

Sequences in slots are sorted into length bands: a band's sequences have lengths between the same two
powers of two. Bands occupy consecutive slots, longest first, so attention of each band is computed over a
view of the cache that is as long as the band's longest sequence. With a long tail of lengths, computing all
sequences over the longest length would cost several times more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from hflow.engines.request import GenerationRequest
from hflow.models.attention_kernels import CAUSAL, Reach, additive_mask, cached_attention

Ints = npt.NDArray[np.int64]

_LENGTH_STEP = 16


def padded_length(num_tokens: int) -> int:
    """Round a length up to one that attention is computed over: a multiple of 16, and at least 32.

    Over such lengths the masked tail adds exact zeros in the same summation order, so a sequence's result
    does not depend on the lengths of other sequences.
    """
    return max(2 * _LENGTH_STEP, -(-num_tokens // _LENGTH_STEP) * _LENGTH_STEP)


class CachedAttention(Protocol):
    """Attention of one query per running sequence over its cached tokens, in one step."""

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, reach: Reach = CAUSAL
    ) -> Tensor:
        """Compute attention.

        Args:
            queries: `[B, heads, head_dim]`.
            keys: the keys of a layer, `[blocks, kv_heads, tokens, head_dim]`.
            values: the values, as `keys`; of another size in latent attention.

        Returns:
            `[B, heads, head_dim]`.
        """


class KVCache(ABC):
    """Keys and values of the running sequences, in blocks of tokens.

    Each layer has two tensors `[blocks, kv_heads, tokens, head_dim]`. It is allocated when it is first
    written, with the shape and dtype of its keys, so the cache does not depend on the architecture. Unwritten
    entries are zero, since a masked NaN would still be NaN.

    Running sequences are numbered 0 .. n-1, which are the rows of a decode step. The engine tells the cache
    which of them enter, grow and leave.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_layers(self) -> int:
        """Number of layers written so far."""
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows `[N, kv_heads, head_dim]` at `offsets[i]` of `blocks[i]`."""
        if layer not in self._layers:
            self._layers[layer] = (self._allocate(keys), self._allocate(values))
        cached_keys, cached_values = self._layers[layer]
        cached_keys[blocks, :, offsets] = keys
        cached_values[blocks, :, offsets] = values

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, `[blocks, kv_heads, tokens, head_dim]` both."""
        return self._layers[layer]

    def drop(self) -> None:
        """Free the memory. No sequence runs."""
        self._layers = {}

    @abstractmethod
    def admit(self, request: GenerationRequest) -> bool:
        """Keep room for a sequence that enters in this step; return False if there is too little."""

    @abstractmethod
    def enter(self, members: Sequence[GenerationRequest]) -> Ints:
        """Number sequences that were admitted, in order, after those that run.

        Return `[members]`, the tokens of each, from the first one on, that another sequence stores for it.
        """

    @abstractmethod
    def grow(self, lengths: Ints) -> int:
        """Make room for the last token of each running sequence, which `lengths`, `[n]`, include.

        Return the number of sequences, from the first one on, that have room. The others have left.
        """

    @abstractmethod
    def arrange(self, kept: Ints, lengths: Ints) -> Ints:
        """Let all sequences but the numbers `kept`, `[k]`, ascending, leave, and number these anew.

        Return their former numbers in the new order, `[k]`.
        """

    @abstractmethod
    def leave(self, first: int) -> None:
        """Let sequences `first` .. n-1 leave."""

    @abstractmethod
    def locate(self, sequences: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """Return the block of each token of sequences, and the offset in it."""

    @abstractmethod
    def attention(self, lengths: Ints, dtype: torch.dtype) -> CachedAttention:
        """Return the attention of a step; `lengths`, `[B]`, include the tokens of the step."""

    @abstractmethod
    def _allocate(self, like: Tensor) -> Tensor:
        """Return a tensor for rows like these, `[N, kv_heads, head_dim]`."""


class SlotCache(KVCache):
    """A cache with a slot for each sequence, all as long as the longest so far; for CPUs.

    A sequence has the slot of its number, so that a decode step reads views.
    """

    def __init__(self, max_slots: int) -> None:
        super().__init__()
        self._max_slots = max_slots
        self._num_slots = self._num_used = self._length = 0

    @override
    def drop(self) -> None:
        super().drop()
        self._num_slots = self._length = 0

    @override
    def admit(self, request: GenerationRequest) -> bool:
        return True

    @override
    def enter(self, members: Sequence[GenerationRequest]) -> Ints:
        self._num_used += len(members)
        self._reserve(max(len(member.ids) for member in members))
        return np.zeros(len(members), np.int64)

    @override
    def grow(self, lengths: Ints) -> int:
        self._reserve(padded_length(int(lengths.max())))
        return len(lengths)

    @override
    def leave(self, first: int) -> None:
        self._num_used = first

    @override
    def locate(self, sequences: Ints, positions: Ints) -> tuple[Ints, Ints]:
        return sequences, positions

    @override
    def attention(self, lengths: Ints, dtype: torch.dtype) -> CachedAttention:
        return BandAttention(tuple(length_bands(lengths)), torch.from_numpy(lengths - 1), dtype)

    @override
    def arrange(self, kept: Ints, lengths: Ints) -> Ints:
        assigned = assign_slots(kept, lengths)
        self._num_used = len(kept)
        moves = np.not_equal(assigned, kept)
        if not moves.any():
            return kept
        sources, targets = torch.from_numpy(kept[moves]), torch.from_numpy(assigned[moves])
        length = int(lengths[moves].max())
        for layer in self._layers.values():
            for tensor in layer:
                tensor[targets, :, :length] = tensor[sources, :, :length]
        return kept[np.argsort(assigned)]

    def _reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens, keeping the content."""
        if self._num_used <= self._num_slots and length <= self._length:
            return
        if self._num_used > self._num_slots:
            self._num_slots = max(self._num_used, min(2 * self._num_slots, self._max_slots))
        if length > self._length:
            self._length = padded_length(max(length, self._length * 5 // 4))
        for index, (keys, values) in self._layers.items():
            self._layers[index] = (self._enlarged(keys), self._enlarged(values))

    @override
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


class LengthBand(NamedTuple):
    """Sequences in slots `first .. last - 1`, which attend over `length` tokens."""

    first: int
    last: int
    length: int


@dataclass(frozen=True)
class BandAttention:
    """Attention over views of slots, one for each band of lengths."""

    bands: tuple[LengthBand, ...]
    positions: Tensor
    """int64 `[B]`: the position of each query."""
    dtype: torch.dtype
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """Window -> additive mask `[B, 1, 1, longest band]`, made when a layer needs it first."""

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, reach: Reach = CAUSAL
    ) -> Tensor:
        """Compute attention; see `CachedAttention`."""
        if reach.window not in self.masks:
            longest = max(band.length for band in self.bands)
            self.masks[reach.window] = additive_mask(self.positions, longest, self.dtype, reach.window)
        mask = self.masks[reach.window]
        attended = [
            cached_attention(
                queries[first:last],
                keys[first:last, :, :length],
                values[first:last, :, :length],
                mask[first:last, :, :, :length],
                scale,
                reach.sinks,
            )
            for first, last, length in self.bands
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)


def assign_slots(slots: Ints, lengths: Ints) -> Ints:
    """Return n sequences' slots, 0 .. n-1, `[n]`: longer bands first, moving as few as possible."""
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
