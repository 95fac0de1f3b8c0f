"""The device grid (machines, devices, the replicas on each), and memory as bars against the capacity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hflow.base.text import format_bytes, format_ranges_briefly, format_share, pluralize
from hflow.planner.plan.forecast import MemoryCategory, PhaseMemory
from hflow.planner.plan.routing import rank_order
from hflow.planner.plan.rows import Plan, Replica
from hflow.report.html.plan.routes import RouteView, Sets, route_views
from hflow.report.text.plan.memory import DeviceClass, device_classes

NUM_SHADES = 4
MOST_CLASSES = 6
"""Number of device classes that are shown at once."""


@dataclass(frozen=True)
class BarPiece:
    """One piece of a bar. Positions are percentages of the scale."""

    name: str
    kind: int
    """Index of its colour, from 1."""
    shade: int
    """Shade of its model; 0 for the first model, and for what belongs to none."""
    is_transient: bool
    left: float
    width: float
    size: str


@dataclass(frozen=True)
class PhaseBar:
    """One phase of a class of devices."""

    phase: str
    total: str
    share: str
    is_peak: bool
    is_too_much: bool
    items: tuple[BarPiece, ...]


@dataclass(frozen=True)
class ClassView:
    """Devices that hold the same in every phase."""

    group: str
    devices: str
    number: str
    capacity: str
    """Memory of each device."""
    capacity_at: float
    """Percentage of the scale."""
    phases: tuple[PhaseBar, ...]


@dataclass(frozen=True)
class MemoryView:
    """All bars."""

    classes: tuple[ClassView, ...]
    num_shown: int
    kinds: tuple[tuple[str, int], ...]
    """(category, colour) of the categories that occur."""
    shades: tuple[tuple[str, int], ...]
    """(model, shade) of the models with replicas, if there are several."""


def memory_view(plan: Plan) -> MemoryView | None:
    """Return the bars of a plan; None if no memory is known."""
    rows = plan.forecast.memory
    if not rows:
        return None
    memory_of = plan.cluster.memory_of
    scale = max(*(memory_of(row.devices[0]) for row in rows), *(row.total for row in rows)) * 1.02
    classes = sorted(device_classes(rows), key=lambda one: -one.peak.total)
    shades = model_shades(plan)
    of_replica = {replica.name: shades[replica.model] for replica in plan.replicas}
    views = tuple(_class(one, scale, memory_of(one.devices[0]), of_replica) for one in classes)
    shown = {item.kind for view in views for bar in view.phases for item in bar.items}
    return MemoryView(
        classes=views,
        num_shown=min(MOST_CLASSES, len(views)),
        kinds=tuple((category.value, i) for i, category in enumerate(MemoryCategory, 1) if i in shown),
        shades=tuple(shades.items()) if len(shades) > 1 else (),
    )


def model_shades(plan: Plan) -> dict[str, int]:
    """Return the shade of each model with replicas, from 0."""
    models = dict.fromkeys(replica.model for replica in plan.replicas)
    return {model: i % NUM_SHADES for i, model in enumerate(models)}


def _class(one: DeviceClass, scale: float, capacity: int, shades: Mapping[str, int]) -> ClassView:
    return ClassView(
        group=one.peak.group,
        devices=format_ranges_briefly(one.devices),
        number=pluralize(len(one.devices), "device"),
        capacity=format_bytes(capacity),
        capacity_at=round(100 * capacity / scale, 2),
        phases=tuple(
            PhaseBar(
                phase=row.phase,
                total=format_bytes(row.total),
                share=format_share(row.total / capacity),
                is_peak=row.total == one.peak.total,
                is_too_much=row.total > capacity,
                items=tuple(_items(row, scale, shades)),
            )
            for row in one.phases
        ),
    )


def _items(row: PhaseMemory, scale: float, shades: Mapping[str, int]) -> Iterator[BarPiece]:
    kinds = {category: i for i, category in enumerate(MemoryCategory, 1)}
    left = 0.0
    for items, is_transient in ((row.resident, False), (row.transient, True)):
        for name, size, category in items:
            width = 100 * size / scale
            if size:
                yield BarPiece(
                    name=name,
                    kind=kinds[category],
                    shade=shades.get(name.partition(" ")[0], 0),
                    is_transient=is_transient,
                    left=round(left, 3),
                    width=round(width, 3),
                    size=format_bytes(size),
                )
            left += width


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
    """The device's replicas."""


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
    machines: tuple[tuple[DeviceView, ...], ...]
    groups: tuple[tuple[str, int, str], ...]
    """(name, colour, devices) of the legend."""
    replicas: tuple[ReplicaView, ...]
    routes: tuple[RouteView, ...]
    sets: tuple[tuple[tuple[int, int], ...], ...]
    """Sets of devices, which routes refer to by index, as runs `[first, last]`."""
    peaks: tuple[str, ...]
    """Device -> its fullest phase in words; empty if unknown."""


def devices_view(plan: Plan, consumers: Iterable[str]) -> DevicesView:
    """Return the grid of a plan's cluster. The inputs of consumers, batch nodes, may be shown as routes."""
    cluster, sets = plan.cluster, Sets()
    colours, shades, peaks = group_colours(plan), model_shades(plan), plan.forecast.peaks()
    squares = _squares(plan, peaks)
    starts = range(0, cluster.num_devices, cluster.devices_per_node)
    return DevicesView(
        title=_title(cluster.num_nodes, cluster.devices_per_node),
        size=_size(cluster.num_devices),
        per_machine=cluster.devices_per_node,
        machines=tuple(squares[start : start + cluster.devices_per_node] for start in starts),
        groups=tuple((g.name, colours[g.name], format_ranges_briefly(g.devices)) for g in plan.groups),
        replicas=tuple(
            _replica(replica, colours[replica.groups[0]], shades[replica.model]) for replica in plan.replicas
        ),
        routes=route_views(plan, consumers, sets),
        sets=sets.runs(),
        peaks=tuple(_peak_text(plan, peaks.get(device)) for device in range(cluster.num_devices)),
    )


def _squares(plan: Plan, peaks: Mapping[int, PhaseMemory]) -> tuple[DeviceView, ...]:
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
            fill=round(min(1.0, peaks[device].total / cluster.memory_of(device)), 3)
            if device in peaks
            else 0.0,
            names=tuple(names.get(device, ())),
        )
        for device in range(cluster.num_devices)
    )


def group_colours(plan: Plan) -> dict[str, int]:
    """Return the colour number of each device group, from 1."""
    return {group.name: i % NUM_COLOURS + 1 for i, group in enumerate(plan.groups)}


def _title(machines: int, per_machine: int) -> str:
    devices = pluralize(per_machine, "device")
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
        size=pluralize(replica.layout.world, "device"),
        workers=replica.workers,
        coords=tuple(replica.layout.coords(order, rank) for rank in range(replica.layout.world)),
        heads=replica.heads,
    )


def _peak_text(plan: Plan, peak: PhaseMemory | None) -> str:
    if peak is None:
        return ""
    memory = plan.cluster.memory_of(peak.devices[0])
    return f"{format_bytes(peak.total)} of {format_bytes(memory)} in {peak.phase}"
