"""Numbers and settings as people read them: bytes, seconds, counts, shares, ranges, `key=value`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

TIMES, MINUS, DASH = "\u00d7", "\u2212", "\u2013"
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
SECOND_UNITS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
LONG_UNITS = ((2 * DAY, DAY, "days"), (2 * HOUR, HOUR, "h"), (10 * MINUTE, MINUTE, "min"))
"""Fewest seconds that are shown in a unit, seconds of the unit, and its name."""


def format_bytes(num_bytes: float) -> str:
    """Format bytes with three digits in the largest unit that fits, as in `61.3 GiB`."""
    size, unit = float(num_bytes), 0
    while size >= 999.5 and unit < len(BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{_digits(size) if unit else round(size)} {BYTE_UNITS[unit]}"


def format_bytes_evenly(num_bytes: float) -> str:
    """Format bytes with one decimal place in the unit that gives a number below 1024, as in `61.3 GiB`.

    Unlike the digits of `format_bytes`, those of two sizes in one unit end at the same place.
    """
    unit = 0
    while num_bytes >= 1024 and unit < len(BYTE_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f} B" if unit == 0 else f"{num_bytes:.1f} {BYTE_UNITS[unit]}"


def format_gib(num_bytes: float) -> str:
    """Format bytes of any size as `57.8 GiB`, so that the numbers of a sentence can be compared."""
    return f"{num_bytes / (1 << 30):.1f} GiB"


def format_seconds(seconds: float) -> str:
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


def format_count(number: float) -> str:
    """Format a count: `1,024`; small numbers keep three digits."""
    return f"{number:,.0f}" if number >= 100 else _digits(number)


def format_parameters(number: int) -> str:
    """Format a number of parameters: `7.62 billion`, `530 million`."""
    return f"{_digits(number / 1e9)} billion" if number >= 1e9 else f"{_digits(number / 1e6)} million"


def format_number(value: float) -> str:
    """Format a number of any size in few characters."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.1f}"


def format_share(share: float) -> str:
    """Format a share as a percentage: `12 %`."""
    return f"{100 * share:.0f} %"


def pluralize(number: int, noun: str) -> str:
    """Format a number with its noun: `1 device`, `1,024 devices`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def format_setting(key: str, value: object) -> str:
    """Format a setting as a user writes it: `models.actor.gen.delta=true`."""
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def find_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the (first, last) of each run of consecutive numbers, which ascend."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def format_ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers as runs, as a placement is written: `0-3,6`."""
    return ",".join(map(_range, find_runs(numbers)))


def format_ranges_briefly(numbers: Sequence[int]) -> str:
    """Format numbers as runs: `0-7`, `0-3, 8-11`; of five or more runs, the first two and the last."""
    shown = [_range(run) for run in find_runs(sorted(numbers))]
    if len(shown) > 4:
        return f"{shown[0]}, {shown[1]}, … {shown[-1]} ({len(numbers):,})"
    return ", ".join(shown)


def _range(run: tuple[int, int]) -> str:
    first, last = run
    return str(first) if first == last else f"{first}-{last}"


def _digits(number: float) -> str:
    """Format with at least three digits, without trailing zeros."""
    if number < 0.995:
        return f"{number:.2g}"
    places = 0 if number >= 99.95 else 1 if number >= 9.995 else 2
    text = f"{number:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
