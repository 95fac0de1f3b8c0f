"""Which slot of the cache a sequence has: long ones first, so that each attends over little more than it has.

Sequences are of one **band** when the same power of two holds their lengths. Bands lie one behind another, so
that attention of each is computed over a view of the cache that is as long as the band's longest. Otherwise
all would be computed over the longest of all: with a long tail of lengths several times what there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hflow.backends.embedded_engine.cache import padded_length

Ints = npt.NDArray[np.int64]

_ENDS = padded_length(1) * 2 ** np.arange(32)
"""Band -> the largest length in it."""
_LARGEST = frozenset(_ENDS.tolist())


class Band(NamedTuple):
    """Sequences in slots `first .. last - 1`, which attend over `length` tokens."""

    first: int
    last: int
    length: int


def outgrows_band(length: int) -> bool:
    """Whether a sequence has just become too long for its band."""
    return length - 1 in _LARGEST


def arrange(slots: Ints, lengths: Ints) -> Ints:
    """The slots 0 .. n-1 of n sequences, longer bands first; as many as possible stay where they are.

    Args:
        slots: `[n]`, where each lies now.
        lengths: `[n]`, tokens of each.
    """
    band = _band(lengths)
    wanted = np.sort(band)[::-1]
    """Slot -> band of whoever is to lie there."""
    stays = slots < len(slots)
    stays[stays] = wanted[slots[stays]] == band[stays]
    is_free = np.ones(len(slots), np.bool_)
    is_free[slots[stays]] = False
    movers = np.flatnonzero(~stays)
    arranged = slots.copy()
    arranged[movers[np.argsort(-band[movers], kind="stable")]] = np.flatnonzero(is_free)
    return arranged


def bands(lengths: Ints) -> Iterator[Band]:
    """The bands of sequences that are arranged, by slot."""
    band = _band(lengths)
    starts = [0, *(np.flatnonzero(np.diff(band)) + 1).tolist(), len(band)]
    for first, last in pairwise(starts):
        if first < last:
            yield Band(first, last, padded_length(int(lengths[first:last].max())))


def _band(lengths: Ints) -> Ints:
    found: Ints = np.searchsorted(_ENDS, lengths)
    return found
