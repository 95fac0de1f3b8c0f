"""Values of a plan's JSON rows as short texts, and where two values first differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.planner.layout import Layout

ABSENT = "none"
_NUM_RANGES = 6
"""Ranges of devices that are written out."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class ShownValue:
    """A value of a plan, and how it is shown."""

    value: Any
    text: str
    exact: str | None = None
    """A longer text, for a value that differs from one with the same text; None: `value` as JSON."""


def shown(value: Any) -> ShownValue:
    """Return a value that is shown as it is."""
    return ShownValue(value, plain(value))


def plain(value: Any) -> str:
    """Return a JSON value as short text: names and numbers without quotes, lists with commas."""
    if value is None or value == []:
        return ABSENT
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(map(plain, value))
    return json.dumps(value, ensure_ascii=False)


def device_ranges(ids: Sequence[int]) -> str:
    """Return devices in their order, evenly spaced ones as ranges: `0-3 6 5`, `0-60 by 4`."""
    texts, start = [], 0
    while start < len(ids):
        stop = _evenly_spaced(ids, start)
        step = ids[start + 1] - ids[start] if stop > start + 1 else 1
        if stop - start < 3 and step != 1:
            stop = start + 1
        texts.append(_range(ids[start], ids[stop - 1], step))
        start = stop
    more = [f"... ({len(ids)})"] if len(texts) > _NUM_RANGES else []
    return " ".join([*texts[:_NUM_RANGES], *more]) or ABSENT


def _evenly_spaced(ids: Sequence[int], start: int) -> int:
    """Return the end of the longest evenly spaced run from `start` on."""
    stop = min(start + 2, len(ids))
    while stop < len(ids) and ids[stop] - ids[stop - 1] == ids[start + 1] - ids[start] > 0:
        stop += 1
    return stop


def _range(first: int, last: int, step: int) -> str:
    if first == last:
        return str(first)
    return f"{first}-{last}" if step == 1 else f"{first}-{last} by {step}"


def size(num_bytes: float) -> str:
    """Return bytes in the unit that gives a number below 1024."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f} B" if unit == 0 else f"{num_bytes:.1f} {_UNITS[unit]}"


def shown_size(num_bytes: int) -> ShownValue:
    """Return bytes as a value that is shown in a larger unit."""
    return ShownValue(num_bytes, size(num_bytes), f"{num_bytes:,} B")


def seconds(value: float) -> str:
    """Return seconds with three significant digits."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def layout(text: str) -> str:
    """Return a layout without axes of size 1: `d2t1p1` is `d2`, and a single device is `d1`."""
    whole = Layout.parse(text)
    axes = {"d": whole.data, "t": whole.tensor, "p": whole.pipe, "c": whole.context, "e": whole.expert}
    return "".join(f"{axis}{num}" for axis, num in axes.items() if num > 1) or "d1"


def is_equal(before: Any, after: Any) -> bool:
    """Return whether two JSON values have equal texts; 1, 1.0 and true do not."""
    return json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True)


def first_difference(before: Any, after: Any, path: str = "") -> tuple[str, Any, Any]:
    """Return the first path at which two JSON values differ, and both values there."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        key = next(k for k in {**before, **after} if not _have_equal(before, after, k))
        return first_difference(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        place = next(i for i, pair in enumerate(zip(before, after, strict=True)) if not is_equal(*pair))
        return first_difference(before[place], after[place], f"{path}[{place}]")
    return path, before, after


def _have_equal(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> bool:
    return key in before and key in after and is_equal(before[key], after[key])


def distinct_texts(before: ShownValue, after: ShownValue) -> tuple[str, str]:
    """Return different texts for two different values."""
    if before.text != after.text:
        return before.text, after.text
    if before.exact is not None and after.exact is not None:
        return before.exact, after.exact
    path, one, other = first_difference(before.value, after.value)
    if isinstance(one, list) and isinstance(other, list):
        one, other = f"{len(one)} entries", f"{len(other)} entries"
    at = f"{path}: " if path else ""
    return f"{before.text} ({at}{json.dumps(one)})", f"{after.text} ({at}{json.dumps(other)})"
