"""Means of parts of a curve: what is drawn of a long one, and the values that it began and ended with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

Points = Sequence[tuple[int, float]]
"""(completed steps, value), ascending."""

END_SHARE = 0.1
"""Share of a curve's values whose mean is its first or its final value: single steps are noisy."""


MAX_POINTS = 240
"""Points of a curve that are drawn; more are averaged."""


def ends_of(points: Points) -> tuple[float, float]:
    """Return the means of the first and of the last tenth of a curve's values, at least of one."""
    count = max(1, math.floor(END_SHARE * len(points)))
    values = [value for _, value in points]
    return statistics.fmean(values[:count]), statistics.fmean(values[-count:])


def thinned(points: Points, most: int) -> tuple[tuple[int, float], ...]:
    """Return at most `most` points: means of consecutive ones, at the last step of each."""
    count = min(most, len(points))
    edges = [len(points) * i // count for i in range(count + 1)] if count else []
    parts = [points[first:last] for first, last in pairwise(edges)]
    return tuple((part[-1][0], statistics.fmean(value for _, value in part)) for part in parts)
