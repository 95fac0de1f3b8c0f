"""The language of placements: items `NAMES=DEVICES[:LAYOUT]`, as in `actor,ref=0-3:d2t2p1 actor.gen=4-7:d4`.

NAMES are replicas, separated by commas: `actor` trains or infers, `actor.gen` generates. DEVICES are numbers
and ranges (`0-3,6`), `all`, or another item's name, whose devices it shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hflow.errors import PlanError, nearest
from hflow.planner.ir import ClusterSpec
from hflow.planner.placement.device_groups import Devices, device_ranges
from hflow.planner.placement.replicas import EVERYTHING

_ITEM = re.compile(r"([^=:]+)=([^=:]+)(?::([^=:]+))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Item:
    """One item as it was written."""

    text: str
    names: tuple[str, ...]
    devices: str
    layout: str | None


def parse_items(text: str, known: Sequence[str]) -> dict[str, Item]:
    """The item that places each name.

    Args:
        text: items, separated by blanks.
        known: names that may be placed.

    Raises:
        PlanError: for text that is no item, an unknown name, or one that is placed twice.
    """
    found: dict[str, Item] = {}
    for item in _items(text):
        for name in item.names:
            if name not in known:
                raise PlanError(
                    f"placement: {item.text!r} names {name!r}, which this recipe does not have"
                    f"{nearest(name, known)} (known: {', '.join(known)})"
                )
            if name in found:
                raise PlanError(
                    f"placement: {name!r} is placed by {found[name].text!r} and by {item.text!r}; keep one"
                )
            found[name] = item
    return found


def devices_of(name: str, items: Mapping[str, Item], cluster: ClusterSpec) -> Devices:
    """The devices of a name, in order, through the names that it shares them with.

    Raises:
        PlanError: for devices that do not exist, or names that lead nowhere.
    """
    seen = [name]
    while (other := items[seen[-1]].devices) in items:
        if other in seen:
            raise PlanError(
                f"placement: {items[name].text!r} leads back to itself; write devices, as in {name}=0-3"
            )
        seen.append(other)
    item = items[seen[-1]]
    if item.devices == EVERYTHING:
        return tuple(range(cluster.num_devices))
    parts = item.devices.split(",")
    found = sorted(device for part in parts for device in _range(part, item, items, cluster))
    repeated = next((one for one, other in pairwise(found) if one == other), None)
    if repeated is not None:
        raise PlanError(f"placement: {item.text!r} lists device {repeated} twice; list it once")
    return tuple(found)


def _items(text: str) -> Iterator[Item]:
    if not text.split():
        raise PlanError("placement is empty; write items such as actor=0-3:d2t2p1, or set it to null")
    for item in text.split():
        match = _ITEM.fullmatch(item)
        names = tuple(match.group(1).split(",")) if match else ()
        if match is None or not all(names):
            raise PlanError(
                f"placement: {item!r} is not understood; write NAMES=DEVICES or NAMES=DEVICES:LAYOUT, as in "
                "actor,ref=0-3:d2t2p1"
            )
        yield Item(item, names, match.group(2), match.group(3))


def _range(part: str, item: Item, items: Mapping[str, Item], cluster: ClusterSpec) -> range:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise PlanError(
            f"placement: {part!r} in {item.text!r} is no device, no range such as 0-3, and no other item's "
            f"name{nearest(part, items)}"
        )
    first, last = int(match.group(1)), int(match.group(2) or match.group(1))
    if last < first:
        raise PlanError(f"placement: {part!r} in {item.text!r} runs backwards; write {last}-{first}")
    if last >= cluster.num_devices:
        raise PlanError(
            f"placement: {item.text!r} names device {last}, but cluster {cluster.name} has "
            f"{device_ranges(range(cluster.num_devices))}"
        )
    return range(first, last + 1)
