"""A curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values, oldest first, in at most `width` characters.

    More values than that are averaged into `width` bins. The lowest bin is drawn `▁`, the highest
    `█`; equal ones all `▁`. What is not finite is left out.
    """
    bins = _bins([value for value in values if math.isfinite(value)], width)
    if not bins:
        return ""
    low, span = min(bins), max(bins) - min(bins)
    top = len(LEVELS) - 1
    return "".join(LEVELS[round((value - low) / span * top) if span else 0] for value in bins)


def _bins(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [len(values) * i // width for i in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
