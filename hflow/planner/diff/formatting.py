"""Values of a plan's JSON rows as short texts, and where two values part."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.planner.layout import Layout

ABSENT = "none"
_NUM_RANGES = 6
"""Of devices, that are written out."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Fact:
    """One value of a plan, and how it is shown."""

    value: Any
    text: str


def fact(value: Any) -> Fact:
    """A value that is shown as it is."""
    return Fact(value, plain(value))


def plain(value: Any) -> str:
    """A JSON value in few letters: names and numbers without quotes, lists with commas."""
    if value is None or value == []:
        return ABSENT
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(map(plain, value))
    return json.dumps(value, ensure_ascii=False)


def devices(ids: Sequence[int]) -> str:
    """Devices in their order, where they are evenly spaced as ranges: `0-3 6 5`, `0-60 by 4`."""
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
    """The end of the longest run from `start` on whose neighbours are equally far apart."""
    stop = min(start + 2, len(ids))
    while stop < len(ids) and ids[stop] - ids[stop - 1] == ids[start + 1] - ids[start] > 0:
        stop += 1
    return stop


def _range(first: int, last: int, step: int) -> str:
    if first == last:
        return str(first)
    return f"{first}-{last}" if step == 1 else f"{first}-{last} by {step}"


def size(num_bytes: float) -> str:
    """Bytes in the unit that leaves less than 1024 of them."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f} B" if unit == 0 else f"{num_bytes:.1f} {_UNITS[unit]}"


def seconds(value: float) -> str:
    """Seconds with three significant digits."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def layout(text: str) -> str:
    """A layout without its axes of size 1: `d2t1p1` is `d2`, and a single device `d1`."""
    whole = Layout.parse(text)
    axes = {"d": whole.data, "t": whole.tensor, "p": whole.pipe}
    return "".join(f"{axis}{num}" for axis, num in axes.items() if num > 1) or "d1"


def same(before: Any, after: Any) -> bool:
    """Whether two JSON values are written alike; 1, 1.0 and true are not."""
    return json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True)


def parting(before: Any, after: Any, path: str = "") -> tuple[str, Any, Any]:
    """The first place at which two different JSON values part, and what is there on either side."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        key = next(k for k in {**before, **after} if not _have_same(before, after, k))
        return parting(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        place = next(i for i, pair in enumerate(zip(before, after, strict=True)) if not same(*pair))
        return parting(before[place], after[place], f"{path}[{place}]")
    return path, before, after


def _have_same(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> bool:
    return key in before and key in after and same(before[key], after[key])


def apart(before: Fact, after: Fact) -> tuple[str, str]:
    """Texts of two different facts that differ too."""
    if before.text != after.text:
        return before.text, after.text
    path, one, other = parting(before.value, after.value)
    if isinstance(one, list) and isinstance(other, list):
        one, other = f"{len(one)} entries", f"{len(other)} entries"
    at = f"{path}: " if path else ""
    return f"{before.text} ({at}{json.dumps(one)})", f"{after.text} ({at}{json.dumps(other)})"
