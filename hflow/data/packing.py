"""Assigns sequences to micro-batches under a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Integers = Sequence[int] | npt.NDArray[np.int64]


def pack_sequences(lengths: Integers, budget: int, keep_together: Integers | None = None) -> list[list[int]]:
    """Split sequences into micro-batches of at most `budget` tokens by first-fit decreasing.

    Args:
        lengths: tokens of each sequence.
        budget: maximum tokens of a micro-batch. A unit that is longer is a micro-batch of its own.
        keep_together: a label for each sequence. Sequences with equal labels form a unit, which is not split.

    Returns:
        Row indices of each micro-batch, ascending; the micro-batches are ordered by their first row. There
        are at most twice as many micro-batches as necessary, and usually a few per cent more.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and sizes.sum() <= budget:
        return [list(range(len(sizes)))]
    units = _units(len(sizes), keep_together)
    totals = np.array([sizes[unit].sum() for unit in units], dtype=np.int64)
    bins = [
        np.sort(np.concatenate([units[index] for index in members])).tolist()
        for members in _first_fit_decreasing(totals, budget)
    ]
    return sorted(bins, key=lambda rows: rows[0])


def _units(count: int, labels: Integers | None) -> list[npt.NDArray[np.int64]]:
    """Return the rows of each unit."""
    if labels is None:
        return list(np.arange(count, dtype=np.int64)[:, None])
    order = np.argsort(np.asarray(labels), kind="stable")
    cuts = np.flatnonzero(np.diff(np.asarray(labels)[order])) + 1
    return np.split(order, cuts) if count else []


def _first_fit_decreasing(sizes: npt.NDArray[np.int64], budget: int) -> list[list[int]]:
    """Return indices of `sizes` by bin: the largest first, each into the first bin with room for it."""
    free = np.zeros(len(sizes), dtype=np.int64)
    bins: list[list[int]] = []
    for index in np.argsort(-sizes, kind="stable"):
        fits = np.flatnonzero(free[: len(bins)] >= sizes[index])
        if len(fits) == 0:
            free[len(bins)] = max(budget - sizes[index], 0)
            bins.append([int(index)])
        else:
            free[fits[0]] -= sizes[index]
            bins[fits[0]].append(int(index))
    return bins
