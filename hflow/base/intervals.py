"""Intervals of time."""

from __future__ import annotations

from collections.abc import Iterable


def covered_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals `(start, end)`."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
