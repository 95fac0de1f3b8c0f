"""The replicas that a graph needs, and the device groups that they run on.

A model that a train node writes has a replica `NAME@train`; any other model whose weights a batch node reads
or updates has `NAME@infer`; a model that generates has `NAME@gen` as well. A device group is a set of devices
with the same replicas, which take turns. A replica may use several groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from hflow.base.errors import PlanError, nearest
from hflow.base.text import format_ranges
from hflow.graph.ir import Graph, Node
from hflow.graph.queries import trained_models
from hflow.planner.models.choices import UNDECIDED
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.routing import on_workers
from hflow.planner.plan.rows import DeviceGroup, Replica, devices_of
from hflow.shapes.layout import Layout, even_blocks

Role = Literal["train", "infer", "gen"]
Devices = tuple[int, ...]

GEN_SUFFIX = ".gen"
"""End of the name of a replica that generates, in a placement."""

ALL_DEVICES = "all"
"""The group of models without a group of their own. If there is no other group, it has all devices."""


@dataclass(frozen=True)
class UnplacedReplica:
    """A replica that has no devices yet."""

    model: str
    role: Role
    groups: tuple[str, ...]
    layout: Layout | None
    backend: str
    dtype: str

    @property
    def name(self) -> str:
        """The replica's name, `actor@train`."""
        return f"{self.model}@{self.role}"


def place_replicas(graph: Graph, request: PlanRequest) -> tuple[tuple[DeviceGroup, ...], tuple[Replica, ...]]:
    """Give every replica its groups, layout and workers. Engines that are not configured are left undecided.

    Raises:
        PlanError: for unknown models or groups, and layouts that do not fit their groups.
    """
    known = [model.name for model in graph.models]
    for name in request.models:
        if name not in known:
            raise PlanError(f"recipe {graph.name!r} has no model {name!r}{nearest(name, known)}")
    unplaced = _unplaced_replicas(graph, request)
    min_sizes: dict[str, int | None] = {}
    for replica in unplaced:
        if len(replica.groups) > 1 and not request.groups:
            raise PlanError(
                f"{replica.name} is in groups {' and '.join(replica.groups)}, which have no devices yet; set "
                f"groups.{replica.groups[0]} and those of the others, as in groups.{replica.groups[0]}=[0,1]"
            )
        for group in replica.groups:
            sizes = [min_sizes.get(group), replica.layout.world if replica.layout else None]
            min_sizes[group] = max((size for size in sizes if size is not None), default=None)
    groups = device_groups(request.cluster, request.groups, min_sizes or {ALL_DEVICES: None})
    placed = tuple(_place(replica, [groups[name] for name in replica.groups]) for replica in unplaced)
    return tuple(groups.values()), placed


def replica_roles(graph: Graph) -> list[tuple[str, Role]]:
    """Return model and role of every replica that the graph needs."""
    in_batches = {m for node in graph.nodes if not node.spec.opens_stream for m in _weights(node)}
    generating = {m for node in graph.nodes if node.spec.opens_stream for m in node.spec.reads_weights}
    trained = trained_models(graph)
    roles: list[tuple[str, Role]] = []
    for model in (spec.name for spec in graph.models):
        if model in in_batches:
            roles.append((model, "train" if model in trained else "infer"))
        if model in generating:
            roles.append((model, "gen"))
    return roles


def device_groups(
    cluster: ClusterSpec, explicit: Mapping[str, Devices], min_sizes: Mapping[str, int | None]
) -> dict[str, DeviceGroup]:
    """Return the groups that replicas name, with their devices.

    Args:
        explicit: devices of each group; if empty, devices are assigned in the order of `min_sizes`.
        min_sizes: group that a replica names -> devices of its largest layout; None without a layout.

    Raises:
        PlanError: for an unknown group, one that no replica names, groups that overlap, or more devices than
            the cluster has.
    """
    if explicit:
        devices = {name: _explicit_devices(name, explicit, cluster) for name in min_sizes}
        if (unused := next((name for name in explicit if name not in min_sizes), None)) is not None:
            raise PlanError(
                f"groups.{unused} is set, but no model names it; set models.NAME.group={unused} or "
                f"models.NAME.gen.group={unused}, or remove it"
            )
    else:
        devices = _assign_devices(cluster, min_sizes)
    _check_disjoint(devices)
    return {name: DeviceGroup(name, ids) for name, ids in devices.items()}


def _explicit_devices(name: str, explicit: Mapping[str, Devices], cluster: ClusterSpec) -> Devices:
    if name not in explicit:
        raise PlanError(
            f"unknown device group {name!r}{nearest(name, explicit)} (known: {', '.join(explicit)})"
        )
    devices = tuple(explicit[name])
    if not devices or len(set(devices)) < len(devices):
        raise PlanError(f"device group {name!r} is {list(devices)}; list each of its devices once")
    outside = [device for device in devices if device not in range(cluster.num_devices)]
    if outside:
        raise PlanError(
            f"device group {name!r} names device {outside[0]}, but cluster {cluster.name} "
            f"has devices 0 to {cluster.num_devices - 1}"
        )
    return devices


def _assign_devices(cluster: ClusterSpec, min_sizes: Mapping[str, int | None]) -> dict[str, Devices]:
    """Assign neighbouring devices to each group; a single group gets the whole cluster."""
    if len(min_sizes) == 1:
        return {name: tuple(range(cluster.num_devices)) for name in min_sizes}
    sizes = {name: size for name, size in min_sizes.items() if size is not None}
    without_layout = [name for name in min_sizes if name not in sizes]
    num_free = cluster.num_devices - sum(sizes.values())
    if num_free < len(without_layout):
        needs = ", ".join(f"{name} {min_sizes[name] or 'at least 1'}" for name in min_sizes)
        raise PlanError(
            f"device groups need more than the {cluster.num_devices} devices of cluster {cluster.name} "
            f"({needs}); use smaller layouts, a larger cluster, or one group for all models"
        )
    if without_layout:
        blocks = even_blocks(num_free, len(without_layout))
        sizes |= {name: len(block) for name, block in zip(without_layout, blocks, strict=True)}
    devices, start = {}, 0
    for name in min_sizes:
        devices[name] = tuple(range(start, start + sizes[name]))
        start += sizes[name]
    return devices


def _check_disjoint(devices: Mapping[str, Devices]) -> None:
    """Raise if two groups overlap: a device belongs to one group."""
    for one, other in combinations(devices, 2):
        common = sorted(set(devices[one]) & set(devices[other]))
        if common:
            raise PlanError(
                f"device groups {one!r} and {other!r} both have device {common[0]}; "
                "give them disjoint devices, and name several groups for a model that uses them all, as in "
                f"'models.NAME.group=\"{one},{other}\"'"
            )


def _unplaced_replicas(graph: Graph, request: PlanRequest) -> list[UnplacedReplica]:
    trained = trained_models(graph)
    named = [request.models[m].group for m in trained if m in request.models]
    default = next((group for group in named if group), ALL_DEVICES)
    replicas = []
    for model, role in replica_roles(graph):
        config = request.model(model)
        group = config.group or default
        if role == "gen":
            group, layout = config.gen.group or group, config.gen.layout
            backend = config.gen.engine or UNDECIDED
        else:
            layout, backend = config.layout, config.backend
        groups = named_groups(f"models.{model}.{'gen.' if role == 'gen' else ''}group", group)
        replicas.append(UnplacedReplica(model, role, groups, _layout(layout), backend, config.compute_dtype))
    return replicas


def named_groups(key: str, group: str) -> tuple[str, ...]:
    """Return the device groups that the `group` of a model names, as in `a,b`.

    Raises:
        PlanError: naming the key if a group is empty or listed twice.
    """
    names = tuple(name.strip() for name in group.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise PlanError(f"{key}={group} is not understood; list each group once, as in '{key}=\"a,b\"'")
    return names


def _weights(node: Node) -> tuple[str, ...]:
    return (*node.spec.reads_weights, *node.spec.writes_weights)


def _layout(text: str | None) -> Layout | None:
    return None if text is None else Layout.parse(text)


def _place(replica: UnplacedReplica, groups: Sequence[DeviceGroup]) -> Replica:
    groups = sorted(groups, key=lambda group: min(group.devices))
    devices = devices_of(groups)
    layout = replica.layout or Layout(data=len(devices))
    check_size(replica.name, layout, DeviceGroup(",".join(group.name for group in groups), devices))
    used = devices[: layout.world]
    for group in groups:
        if set(used).isdisjoint(group.devices):
            enough = f"{placement_name(replica.name)}={format_ranges(used)}"
            raise PlanError(
                f"{replica.name}: layout {layout} uses devices {format_ranges(used)}, but none of group "
                f"{group.name!r} ({format_ranges(group.devices)}); give it the devices that it uses, as in "
                f"placement='... {enough}'"
            )
    placed = Replica(
        replica.name,
        replica.model,
        replica.role,
        replica.backend,
        layout,
        tuple(group.name for group in groups),
        workers=(),
        heads=(),
        dtype=replica.dtype,
    )
    return on_workers(placed, used)


def placement_name(replica: str) -> str:
    """Return the name of a replica in a placement: `actor.gen` for `actor@gen`, `actor` for `actor@train`."""
    model, _, role = replica.partition("@")
    return model + GEN_SUFFIX * (role == "gen")


def check_size(replica: str, layout: Layout, group: DeviceGroup) -> None:
    """Raise if a layout needs more devices than its group has.

    Raises:
        PlanError: naming the nearest layout that fits.
    """
    if layout.world > len(group.devices):
        raise PlanError(
            f"{replica}: layout {layout} needs {layout.world} devices, but group {group.name!r} "
            f"has {len(group.devices)}; {_layout_advice(layout, len(group.devices))}"
        )


def _layout_advice(layout: Layout, num_devices: int) -> str:
    """Name the nearest layout that fits, with a smaller data axis, or the number of devices needed."""
    shards = layout.world // layout.data
    if data := num_devices // shards:
        expert = math.gcd(layout.expert, data * layout.context)
        return f"{replace(layout, data=data, expert=expert)} fits"
    axes = "t, p or c" if layout.context > 1 else "t or p"
    return f"give it at least {shards} devices, or reduce its {axes}"
