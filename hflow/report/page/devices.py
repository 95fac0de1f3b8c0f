"""The device grid: machines, their devices, the replicas on each, and how full its memory becomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hflow.planner.plan.routing import rank_order
from hflow.planner.plan.rows import Plan, Replica
from hflow.report.formatting import bytes_text, plural, range_text
from hflow.report.page.memory_view import model_shades
from hflow.report.page.routes import RouteView, Sets, route_views

LARGE, MEDIUM = 8, 64
"""Largest clusters, in devices, that are drawn with large and with medium squares."""
NUM_COLOURS = 8


@dataclass(frozen=True)
class DeviceView:
    """One device."""

    index: int
    colour: int
    """Colour of its group; 0: no group."""
    fill: float
    """Share of its memory that is used in its fullest phase; 0 if unknown."""
    names: tuple[str, ...]
    """Its replicas."""


@dataclass(frozen=True)
class MachineView:
    """One machine."""

    index: int
    devices: tuple[DeviceView, ...]


@dataclass(frozen=True)
class GroupView:
    """One device group in the legend."""

    name: str
    colour: int
    devices: str


@dataclass(frozen=True)
class ReplicaView:
    """One replica: the coordinates of each of its devices."""

    name: str
    layout: str
    group: str
    colour: int
    shade: int
    """Shade of its model."""
    size: str
    workers: tuple[int, ...]
    coords: tuple[tuple[int, int, int, int], ...]
    """rank -> (data, tensor, pipe)."""
    heads: tuple[int, ...]


@dataclass(frozen=True)
class DevicesView:
    """The whole grid."""

    title: str
    size: str
    """`large`, `medium` or `small` squares."""
    per_machine: int
    machines: tuple[MachineView, ...]
    groups: tuple[GroupView, ...]
    replicas: tuple[ReplicaView, ...]
    routes: tuple[RouteView, ...]
    sets: tuple[tuple[tuple[int, int], ...], ...]
    """Sets of devices, which routes refer to by index, as runs `[first, last]`."""
    peaks: tuple[str, ...]
    """Device -> its fullest phase in words; empty if unknown."""


def devices_view(plan: Plan, consumers: Iterable[str]) -> DevicesView:
    """Return the grid of a plan's cluster.

    Args:
        plan: cluster, groups, replicas, forecast.
        consumers: batch nodes whose inputs may be shown as routes.
    """
    cluster, sets = plan.cluster, Sets()
    colours, shades, peaks = group_colours(plan), model_shades(plan), _peaks(plan)
    squares = _squares(plan, peaks)
    starts = range(0, cluster.num_devices, cluster.devices_per_node)
    return DevicesView(
        title=_title(cluster.num_nodes, cluster.devices_per_node),
        size=_size(cluster.num_devices),
        per_machine=cluster.devices_per_node,
        machines=tuple(
            MachineView(i, squares[start : start + cluster.devices_per_node])
            for i, start in enumerate(starts)
        ),
        groups=tuple(GroupView(g.name, colours[g.name], range_text(g.devices)) for g in plan.groups),
        replicas=tuple(
            _replica(replica, colours[replica.groups[0]], shades[replica.model]) for replica in plan.replicas
        ),
        routes=route_views(plan, consumers, sets),
        sets=sets.runs(),
        peaks=tuple(_peak_text(plan, peaks.get(device)) for device in range(cluster.num_devices)),
    )


def _squares(plan: Plan, peaks: Mapping[int, tuple[int, str]]) -> tuple[DeviceView, ...]:
    colours, cluster = group_colours(plan), plan.cluster
    colour_of = {device: colours[group.name] for group in plan.groups for device in group.devices}
    names: dict[int, list[str]] = {}
    for replica in plan.replicas:
        for worker in dict.fromkeys(replica.workers):
            names.setdefault(worker, []).append(replica.name)
    return tuple(
        DeviceView(
            index=device,
            colour=colour_of.get(device, 0),
            fill=round(min(1.0, peaks[device][0] / cluster.memory_bytes), 3) if device in peaks else 0.0,
            names=tuple(names.get(device, ())),
        )
        for device in range(cluster.num_devices)
    )


def group_colours(plan: Plan) -> dict[str, int]:
    """Return the colour number of each device group, from 1."""
    return {group.name: i % NUM_COLOURS + 1 for i, group in enumerate(plan.groups)}


def _title(machines: int, per_machine: int) -> str:
    devices = plural(per_machine, "device")
    return f"One machine with {devices}." if machines == 1 else f"{machines:,} machines with {devices} each."


def _size(num_devices: int) -> str:
    return "large" if num_devices <= LARGE else "medium" if num_devices <= MEDIUM else "small"


def _replica(replica: Replica, colour: int, shade: int) -> ReplicaView:
    order = rank_order(replica.role)
    return ReplicaView(
        name=replica.name,
        layout=str(replica.layout),
        group=", ".join(replica.groups),
        colour=colour,
        shade=shade,
        size=plural(replica.layout.world, "device"),
        workers=replica.workers,
        coords=tuple(replica.layout.coords(order, rank) for rank in range(replica.layout.world)),
        heads=replica.heads,
    )


def _peaks(plan: Plan) -> dict[int, tuple[int, str]]:
    """Return each device's largest number of bytes in any phase, and that phase."""
    peaks: dict[int, tuple[int, str]] = {}
    for phase in plan.forecast.memory if plan.forecast else ():
        total = phase.total
        for device in phase.devices:
            if device not in peaks or total > peaks[device][0]:
                peaks[device] = total, phase.phase
    return peaks


def _peak_text(plan: Plan, peak: tuple[int, str] | None) -> str:
    if peak is None:
        return ""
    return f"{bytes_text(peak[0])} of {bytes_text(plan.cluster.memory_bytes)} in {peak[1]}"
