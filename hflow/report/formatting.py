"""Numbers as readable text: bytes, seconds, counts, devices.

Means of parts of a curve: what is drawn of a long one, and the values that it began and ended with.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from hflow.planner.forecast.figures import SECONDS_PER_DAY, SECONDS_PER_HOUR
from hflow.planner.plan.model_shape import ModelShape, num_parameters
from hflow.planner.plan.rows import Replica

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
SECOND_UNITS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
MINUTE = 60.0
LONG_UNITS = (
    (2 * SECONDS_PER_DAY, SECONDS_PER_DAY, "days"),
    (2 * SECONDS_PER_HOUR, SECONDS_PER_HOUR, "h"),
    (10 * MINUTE, MINUTE, "min"),
)
"""Fewest seconds that are shown in a unit, seconds of the unit, and its name."""
TIMES, MINUS, DASH = "\u00d7", "\u2212", "\u2013"


def bytes_text(num_bytes: float) -> str:
    """Format bytes with three digits in the largest unit that fits, as in `61.3 GiB`."""
    size, unit = float(num_bytes), 0
    while size >= 999.5 and unit < len(BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{_digits(size) if unit else round(size)} {BYTE_UNITS[unit]}"


def seconds_text(seconds: float) -> str:
    """Format seconds: `41.2 s`, `830 ms`, `12 µs`, `0 s`.

    From ten minutes on it is `12.4 min`, from two hours on `5.2 h`, and from two days on `3.1 days`.
    """
    if not seconds:
        return "0 s"
    for least, scale, unit in LONG_UNITS:
        if seconds >= least:
            return f"{_digits(seconds / scale)} {unit}"
    for scale, unit in SECOND_UNITS:
        if seconds < 999.5 * scale or unit == "s":
            return f"{_digits(seconds / scale)} {unit}"
    raise AssertionError("the last unit takes everything")


def count_text(number: float) -> str:
    """Format a count: `1,024`; small numbers keep three digits."""
    return f"{number:,.0f}" if number >= 100 else _digits(number)


def parameters_text(number: int) -> str:
    """Format a number of parameters: `7.62 billion`, `530 million`."""
    return f"{_digits(number / 1e9)} billion" if number >= 1e9 else f"{_digits(number / 1e6)} million"


def size_text(replica: Replica, shape: ModelShape | None) -> str:
    """Return the parameters of a replica and their precision; or whose they are."""
    if replica.base_of:
        return f"those of {replica.base_of}"
    if shape is None:
        return "unknown"
    size, adapters = parameters_text(num_parameters(shape)), replica.adapter_parameters
    size = f"{size} in {replica.dtype}"
    return f"{size} + {parameters_text(adapters)} in fp32" if adapters else size


def share_text(share: float) -> str:
    """Format a share as a percentage: `12 %`."""
    return f"{100 * share:.0f} %"


def rank_order_text(moved_bytes: int, saved_bytes: int) -> str:
    """Format what the order of an engine's ranks saves: `engine ranks ordered for 43 % fewer bytes`."""
    share = saved_bytes / (moved_bytes + saved_bytes)
    return f"engine ranks ordered for {share_text(share)} fewer bytes"


def plural(number: int, noun: str) -> str:
    """Format a number with its noun: `1 device`, `1,024 devices`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def missing_text(num_refused: int, num_all: int) -> str:
    """Format what the means of an evaluation lack: `20 of 100 samples were not evaluated`."""
    return f"{num_refused:,} of {plural(num_all, 'sample')} {'was' if num_all == 1 else 'were'} not evaluated"


def range_text(numbers: Sequence[int]) -> str:
    """Format numbers as runs: `0-7`, `0-3, 8-11`; of five or more runs, the first two and the last."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(shown) > 4:
        return f"{shown[0]}, {shown[1]}, … {shown[-1]} ({len(numbers):,})"
    return ", ".join(shown)


def _digits(number: float) -> str:
    """Format with at least three digits, without trailing zeros."""
    if number < 0.995:
        return f"{number:.2g}"
    places = 0 if number >= 99.95 else 1 if number >= 9.995 else 2
    text = f"{number:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


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
