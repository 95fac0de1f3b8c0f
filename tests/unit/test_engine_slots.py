"""Slots of the embedded engine's cache: long sequences first, with as few moves as possible."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hflow.engines.embedded.cache import (
    LengthBand,
    SlotCache,
    assign_slots,
    length_bands,
    padded_length,
)
from hflow.engines.interface import SamplingParams
from hflow.engines.request import GenerationRequest


@st.composite
def sequences(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Slots with holes, and lengths."""
    slots = np.array(sorted(draw(st.sets(st.integers(0, 40), max_size=24))), np.int64)
    lengths = draw(st.lists(st.integers(1, 300), min_size=len(slots), max_size=len(slots)))
    return slots, np.array(lengths, np.int64)


def test_bands_by_hand():
    assert list(length_bands(np.array([300, 257, 100, 32, 1]))) == [
        LengthBand(0, 2, 304),
        LengthBand(2, 3, 112),
        LengthBand(3, 5, 32),
    ]
    assert list(length_bands(np.array([], np.int64))) == []


def test_assigning_slots_by_hand():
    slots, lengths = np.array([0, 1, 3, 4]), np.array([10, 90, 20, 70])
    assert assign_slots(slots, lengths).tolist() == [2, 1, 3, 0], (
        "only 90 is where it belongs, 20 is among its like"
    )


@given(sequences())
def test_slots_are_compact_and_long_bands_come_first(held: tuple[np.ndarray, np.ndarray]):
    slots, lengths = held
    arranged = assign_slots(slots, lengths)
    assert sorted(arranged) == list(range(len(slots)))
    found = list(length_bands(lengths[np.argsort(arranged)]))
    assert [band.first for band in found] == [0, *(band.last for band in found)][: len(found)]
    assert sum(band.last - band.first for band in found) == len(slots)
    longest = [band.length for band in found]
    assert longest == sorted(longest, reverse=True)
    for band, members in ((b, lengths[np.argsort(arranged)][b.first : b.last]) for b in found):
        assert padded_length(members.max()) == band.length
        assert band.length <= 2 * padded_length(members.min())


@given(sequences())
def test_sequences_in_the_right_band_do_not_move(held: tuple[np.ndarray, np.ndarray]):
    slots, lengths = held
    arranged = assign_slots(slots, lengths)
    assert (assign_slots(arranged, lengths) == arranged).all()
    order = np.argsort(arranged)
    of_slot = {slot: band for band in length_bands(lengths[order]) for slot in range(band.first, band.last)}
    for slot, new in zip(slots.tolist(), arranged.tolist(), strict=True):
        if new != slot and slot in of_slot:
            assert not of_slot[slot].first <= new < of_slot[slot].last


def test_slots_move_all_at_once():
    cache = SlotCache(4)
    members = [GenerationRequest(i, SamplingParams(), [5], 1, 99) for i in range(4)]
    assert cache.enter(members).tolist() == [0] * 4
    rows = torch.arange(4.0)[:, None, None].expand(4, 1, 2)
    cache.write(0, torch.arange(4), torch.zeros(4, dtype=torch.int64), rows, -rows)
    lengths = np.array([1, 40, 1, 90])
    assert cache.arrange(np.arange(4), lengths).tolist() == [3, 1, 2, 0]
    keys, values = cache.layer(0)
    assert keys[:, 0, 0, 0].tolist() == [3, 1, 2, 0]
    assert values[:, 0, 0, 1].tolist() == [-3, -1, -2, 0]
    assert cache.arrange(np.array([0, 2, 3]), lengths[[3, 2, 0]]).tolist() == [0, 3, 2]
    assert keys[:3, 0, 0, 0].tolist() == [3, 0, 2]
