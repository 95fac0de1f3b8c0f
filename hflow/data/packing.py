"""Micro-batches: which sequences share a forward, under a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Integers = Sequence[int] | npt.NDArray[np.int64]


def pack(lengths: Integers, budget: int, keep_together: Integers | None = None) -> list[list[int]]:
    """Split sequences into micro-batches of at most `budget` tokens, first-fit decreasing.

    Args:
        lengths: tokens of each sequence.
        budget: most tokens of a micro-batch; a unit longer than that is its own micro-batch.
        keep_together: a label for each sequence; those with equal labels are never separated.

    Returns:
        Row indices of each micro-batch, ascending, the micro-batches in the order of their first
        row. At most twice as many micro-batches as necessary, usually within a few per cent.
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
    """Rows that must stay together."""
    if labels is None:
        return list(np.arange(count, dtype=np.int64)[:, None])
    order = np.argsort(np.asarray(labels), kind="stable")
    cuts = np.flatnonzero(np.diff(np.asarray(labels)[order])) + 1
    return np.split(order, cuts) if count else []


def _first_fit_decreasing(sizes: npt.NDArray[np.int64], budget: int) -> list[list[int]]:
    """Indices of `sizes` by bin: the largest first, each into the first bin that has room."""
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
