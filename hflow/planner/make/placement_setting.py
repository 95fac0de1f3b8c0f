"""The setting `placement`, which says in one line where replicas run and with which layouts.

It consists of items `NAMES=DEVICES[:LAYOUT]`, as in `actor,ref=0-3:d2t2p1 actor.gen=4-7:d4`. NAMES are
replicas, separated by commas: `actor` trains or infers, `actor.gen` generates. DEVICES are numbers and ranges
(`0-3,6`), `all`, or the name in another item, whose devices it shares. Replicas with common devices take
turns; others run at the same time. Devices with the same replicas form a group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hflow.base.errors import PlanError, nearest
from hflow.base.text import format_ranges
from hflow.config.schema import ModelConfig
from hflow.graph.ir import Graph
from hflow.graph.queries import trained_models
from hflow.planner.make.replicas import ALL_DEVICES, GEN_SUFFIX, Devices, replica_roles
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.request import PlanRequest

_ITEM = re.compile(r"([^=:]+)=([^=:]+)(?::([^=:]+))?")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


@dataclass(frozen=True)
class PlacementItem:
    """One item of a placement as it was written."""

    text: str
    names: tuple[str, ...]
    devices: str
    layout: str | None


def apply_placement(graph: Graph, request: PlanRequest) -> PlanRequest:
    """Replace the `placement` of a request by the groups and layouts that it stands for.

    A replica that no item names runs where the one runs whose weights it uses (`base_of`), or else where the
    first trained model in the placement runs; if the placement has no trained model, it runs on all devices.
    A request without a placement is returned as it is.

    Raises:
        PlanError: for a placement that is invalid, or that contradicts itself or the rest of the request.
    """
    if request.placement is None:
        return request
    names = [model + GEN_SUFFIX * (role == "gen") for model, role in replica_roles(graph)]
    items, devices = placed_devices(request, names)
    if not any(model in items for model in trained_models(graph)):
        _check_unnamed(items, devices, names, request.cluster)
    groups = device_sets(devices, request.cluster)
    group_of = {
        name: ",".join(group for group, members in groups.items() if not set(members).isdisjoint(device_set))
        for name, device_set in devices.items()
    }
    models = {model: request.model(model) for model in dict.fromkeys(map(_model, names))}
    placed = {model: _placed(model, config, items, group_of) for model, config in models.items()}
    return replace(
        request,
        placement=None,
        groups=groups,
        models={**request.models, **placed},
        warnings=(*request.warnings, *_idle_warnings(devices, request.cluster)),
    )


def placed_devices(
    request: PlanRequest, names: Sequence[str]
) -> tuple[dict[str, PlacementItem], dict[str, Devices]]:
    """Return the item and the devices of each name that the placement of a request places.

    Raises:
        PlanError: for a placement that is invalid, or that contradicts itself or the rest of the request.
    """
    items = parse_items(request.placement or "", names)
    for name in names:
        model, dot, suffix = name.partition(".")
        owner = f"{request.model(model).base_of}{dot}{suffix}"
        if name not in items and owner in items:
            items[name] = items[owner]
    _check_no_other_setting_places(request, items)
    return items, {name: devices_of(name, items, request.cluster) for name in items}


def parse_items(text: str, known: Sequence[str]) -> dict[str, PlacementItem]:
    """Return the item that places each name, of items separated by blanks.

    Raises:
        PlanError: for text that is not an item, an unknown name, or a name that is placed twice.
    """
    item_of: dict[str, PlacementItem] = {}
    for item in _items(text):
        for name in item.names:
            if name not in known:
                raise PlanError(
                    f"placement: {item.text!r} names {name!r}, which this recipe does not have"
                    f"{nearest(name, known)} (known: {', '.join(known)})"
                )
            if name in item_of:
                raise PlanError(
                    f"placement: {name!r} is placed by {item_of[name].text!r} and by {item.text!r}; "
                    "remove one of them"
                )
            item_of[name] = item
    return item_of


def replace_layout(text: str, name: str, convert: Callable[[str], str]) -> str:
    """Return items of a placement in which one replica has another layout; unchanged if it has none.

    `convert` returns the new layout for the old one.

    Raises:
        PlanError: for text that is not an item.
    """
    return " ".join(replaced for item in _items(text) for replaced in _with_layout(item, name, convert))


def _with_layout(item: PlacementItem, name: str, convert: Callable[[str], str]) -> Iterator[str]:
    if name not in item.names or item.layout is None:
        yield item.text
        return
    others = ",".join(other for other in item.names if other != name)
    if others:
        yield f"{others}={item.devices}:{item.layout}"
    yield f"{name}={item.devices}:{convert(item.layout)}"


def devices_of(name: str, items: Mapping[str, PlacementItem], cluster: ClusterSpec) -> Devices:
    """Return the devices of a name, ascending, also if it shares them with another name.

    Raises:
        PlanError: for devices that do not exist, or names that refer to each other in a circle.
    """
    chain = [name]
    while (other := items[chain[-1]].devices) in items:
        if other in chain:
            raise PlanError(
                f"placement: {items[name].text!r} refers back to itself; name devices, as in {name}=0-3"
            )
        chain.append(other)
    item = items[chain[-1]]
    if item.devices == ALL_DEVICES:
        return tuple(range(cluster.num_devices))
    parts = item.devices.split(",")
    devices = sorted(device for part in parts for device in _range(part, item, items, cluster))
    repeated = next((one for one, other in pairwise(devices) if one == other), None)
    if repeated is not None:
        raise PlanError(f"placement: {item.text!r} lists device {repeated} twice; list it once")
    return tuple(devices)


def _items(text: str) -> Iterator[PlacementItem]:
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
        yield PlacementItem(item, names, match.group(2), match.group(3))


def _range(part: str, item: PlacementItem, items: Mapping[str, PlacementItem], cluster: ClusterSpec) -> range:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise PlanError(
            f"placement: {part!r} in {item.text!r} is not a device, a range such as 0-3, or the name of "
            f"another item{nearest(part, items)}"
        )
    first, last = int(match.group(1)), int(match.group(2) or match.group(1))
    if last < first:
        raise PlanError(f"placement: range {part!r} in {item.text!r} is backwards; write {last}-{first}")
    if last >= cluster.num_devices:
        raise PlanError(
            f"placement: {item.text!r} names device {last}, but cluster {cluster.name} has devices "
            f"{format_ranges(range(cluster.num_devices))}"
        )
    return range(first, last + 1)


def _check_no_other_setting_places(request: PlanRequest, items: Mapping[str, PlacementItem]) -> None:
    """Raise if the request has groups or layouts besides its placement."""
    keys = [f"groups.{name}" for name in request.groups]
    for model, config in request.models.items():
        keys += [f"models.{model}.group"] if config.group else []
        keys += [f"models.{model}.gen.group"] if config.gen.group else []
        keys += [f"models.{model}.layout"] if config.layout and model in items else []
        keys += [f"models.{model}.gen.layout"] if config.gen.layout and model + GEN_SUFFIX in items else []
    if keys:
        raise PlanError(f"placement and {keys[0]} are both set; remove one of them")


def _check_unnamed(
    items: Mapping[str, PlacementItem],
    devices: Mapping[str, Devices],
    names: Sequence[str],
    cluster: ClusterSpec,
) -> None:
    """Raise if a replica that no item names has all devices while another has only some of them."""
    unnamed = [name for name in names if name not in items and _model(name) not in items]
    partial = next(
        (name for name, device_set in devices.items() if len(device_set) < cluster.num_devices), None
    )
    if unnamed and partial is not None:
        free = format_ranges(_free_devices(devices, cluster))
        raise PlanError(
            f"placement does not name {unnamed[0]!r}, which therefore gets all devices and overlaps "
            f"{items[partial].text!r}; place it too, as in {unnamed[0]}={free or partial}"
        )


def _idle_warnings(devices: Mapping[str, Devices], cluster: ClusterSpec) -> Iterator[str]:
    free = _free_devices(devices, cluster)
    if free:
        yield f"placement leaves devices {format_ranges(free)} of cluster {cluster.name} unused"


def _free_devices(devices: Mapping[str, Devices], cluster: ClusterSpec) -> list[int]:
    """Return the devices that no item names."""
    used = {device for device_set in devices.values() for device in device_set}
    return [device for device in range(cluster.num_devices) if device not in used]


def _first_names(devices: Mapping[str, Devices]) -> dict[Devices, str]:
    """Return each set of devices with the first name that is placed on it."""
    names: dict[Devices, str] = {}
    for name, device_set in devices.items():
        names.setdefault(device_set, name)
    return names


def device_sets(devices: Mapping[str, Devices], cluster: ClusterSpec) -> dict[str, Devices]:
    """Partition the devices into groups, by name: devices with the same replicas form one group.

    A group is named after its replicas. Left out are those that have all devices of another one of them: with
    actor=0-3, critic=2-5 and actor.gen=all of six devices, the group `actor` has devices 0 and 1,
    `actor+critic` has 2 and 3, and `critic` has 4 and 5. All devices of the cluster are called `all`.
    """
    first_names = _first_names(devices)
    sets = [frozenset(device_set) for device_set in first_names]
    names = list(first_names.values())
    covering: dict[tuple[int, ...], list[int]] = {}
    for device in sorted(frozenset().union(*sets)):
        covering.setdefault(tuple(i for i, own in enumerate(sets) if device in own), []).append(device)
    named = {}
    for around, members in covering.items():
        smallest = [i for i in around if not any(sets[other] < sets[i] for other in around)]
        name = "+".join(names[i] for i in smallest)
        named[ALL_DEVICES if len(members) == cluster.num_devices else name] = tuple(members)
    order = {device_set: i for i, device_set in enumerate(first_names)}
    return dict(sorted(named.items(), key=lambda row: order.get(row[1], len(order))))


def _placed(
    model: str, config: ModelConfig, items: Mapping[str, PlacementItem], group_of: Mapping[str, str]
) -> ModelConfig:
    gen = model + GEN_SUFFIX
    return replace(
        config,
        group=group_of.get(model),
        layout=items[model].layout if model in items else config.layout,
        gen=replace(
            config.gen,
            group=group_of.get(gen),
            layout=items[gen].layout if gen in items else config.gen.layout,
        ),
    )


def _model(name: str) -> str:
    return name.removesuffix(GEN_SUFFIX)
