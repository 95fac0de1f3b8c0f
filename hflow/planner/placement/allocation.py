"""A placement in short strings becomes groups of devices and layouts of models.

Sets of devices are equal, so that their replicas form one group and take turns, or disjoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from hflow.errors import PlanError
from hflow.graph.ir import Graph
from hflow.planner.ir import ClusterSpec
from hflow.planner.placement.device_groups import Devices, device_ranges
from hflow.planner.placement.placement_syntax import Item, devices_of, parse_items
from hflow.planner.placement.replicas import EVERYTHING, replica_roles, trained_models
from hflow.planner.request import ModelRequest, PlanRequest

GEN = ".gen"
"""What the name of a replica that generates ends with, in a placement."""


def allocate(graph: Graph, request: PlanRequest) -> PlanRequest:
    """The request with the groups and layouts that its `placement` asks for, if there is one.

    A replica that no item names goes where the first placed one of the trained models is; when none is
    placed, on all devices.

    Raises:
        PlanError: for a placement that cannot be read, or contradicts itself or the rest of the request.
    """
    if request.placement is None:
        return request
    names = [model + GEN * (role == "gen") for model, role in replica_roles(graph)]
    items = parse_items(request.placement, names)
    _check_nothing_else_places(request, items)
    devices = {name: devices_of(name, items, request.cluster) for name in items}
    _check_sets(items, devices)
    if not any(model in items for model in trained_models(graph)):
        _check_rest(items, devices, names, request.cluster)
    group = _groups(devices, request.cluster)
    models = {model: request.model(model) for model in dict.fromkeys(map(_model, names))}
    return replace(
        request,
        placement=None,
        groups={group[name]: devices[name] for name in items},
        models={**request.models, **{m: _placed(m, asked, items, group) for m, asked in models.items()}},
        warnings=(*request.warnings, *_idle(devices, request.cluster)),
    )


def _check_nothing_else_places(request: PlanRequest, items: Mapping[str, Item]) -> None:
    """Refuse a request that places by other means besides."""
    keys = [f"groups.{name}" for name in request.groups]
    for model, asked in request.models.items():
        keys += [f"models.{model}.group"] if asked.group else []
        keys += [f"models.{model}.gen.group"] if asked.gen_group else []
        keys += [f"models.{model}.layout"] if asked.layout and model in items else []
        keys += [f"models.{model}.gen.layout"] if asked.gen_layout and model + GEN in items else []
    if keys:
        raise PlanError(f"placement and {keys[0]} are both given; keep one, and leave the other out")


def _check_sets(items: Mapping[str, Item], devices: dict[str, Devices]) -> None:
    """A device takes its turns in one cyclic order, so that it belongs to one group."""
    names = _first_names(devices)
    for one, other in combinations(names, 2):
        common = sorted(set(one) & set(other))
        if common:
            raise PlanError(
                f"placement: {items[names[one]].text!r} and {items[names[other]].text!r} share "
                f"{device_ranges(common)}, but not all devices; give both the same, so that they take turns, "
                "or disjoint ones"
            )


def _check_rest(
    items: Mapping[str, Item], devices: Mapping[str, Devices], names: Sequence[str], cluster: ClusterSpec
) -> None:
    """Where no trained model is placed, what is left out has all devices, and so must all others."""
    rest = [name for name in names if name not in items and _model(name) not in items]
    some = next((name for name, held in devices.items() if len(held) < cluster.num_devices), None)
    if rest and some is not None:
        free = device_ranges(_free(devices, cluster))
        raise PlanError(
            f"placement leaves out {rest[0]!r}, which then has all devices, and {items[some].text!r} would "
            f"share some of them; place it too, as in {rest[0]}={free or some}"
        )


def _idle(devices: Mapping[str, Devices], cluster: ClusterSpec) -> Iterator[str]:
    free = _free(devices, cluster)
    if free:
        yield f"placement puts nothing on devices {device_ranges(free)} of cluster {cluster.name}"


def _free(devices: Mapping[str, Devices], cluster: ClusterSpec) -> list[int]:
    """Devices that no item names."""
    held = {device for placed in devices.values() for device in placed}
    return [device for device in range(cluster.num_devices) if device not in held]


def _first_names(devices: dict[str, Devices]) -> dict[Devices, str]:
    """Every set of devices with the first name that is placed on it."""
    names: dict[Devices, str] = {}
    for name, held in devices.items():
        names.setdefault(held, name)
    return names


def _groups(devices: dict[str, Devices], cluster: ClusterSpec) -> dict[str, str]:
    """Name -> its group, which is called after the first name on the same devices."""
    names = _first_names(devices)
    names |= {held: EVERYTHING for held in names if len(held) == cluster.num_devices}
    return {name: names[held] for name, held in devices.items()}


def _placed(
    model: str, asked: ModelRequest, items: Mapping[str, Item], group: Mapping[str, str]
) -> ModelRequest:
    gen = model + GEN
    return replace(
        asked,
        group=group.get(model),
        gen_group=group.get(gen),
        layout=items[model].layout if model in items else asked.layout,
        gen_layout=items[gen].layout if gen in items else asked.gen_layout,
    )


def _model(name: str) -> str:
    return name.removesuffix(GEN)
