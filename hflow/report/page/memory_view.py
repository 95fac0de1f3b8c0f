"""Memory as bars: what equal devices hold in each phase, against their capacity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hflow.planner.plan.forecast import MemoryCategory, PhaseMemory
from hflow.planner.plan.rows import Plan
from hflow.report.formatting import bytes_text, plural, range_text, share_text
from hflow.report.memory_classes import DeviceClass, device_classes

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
    phases: tuple[PhaseBar, ...]


@dataclass(frozen=True)
class MemoryView:
    """All bars."""

    capacity: str
    capacity_at: float
    """Percentage of the scale."""
    classes: tuple[ClassView, ...]
    num_shown: int
    kinds: tuple[tuple[str, int], ...]
    """(category, colour) of the categories that occur."""
    shades: tuple[tuple[str, int], ...]
    """(model, shade) of the models with replicas, if there are several."""


def memory_view(plan: Plan) -> MemoryView | None:
    """Return the bars of a plan; None if no memory is known."""
    rows = plan.forecast.memory if plan.forecast else ()
    if not rows:
        return None
    capacity = plan.cluster.memory_bytes
    scale = max(capacity, *(row.total for row in rows)) * 1.02
    classes = sorted(device_classes(rows), key=lambda one: -one.peak.total)
    shades = model_shades(plan)
    of_replica = {replica.name: shades[replica.model] for replica in plan.replicas}
    views = tuple(_class(one, scale, capacity, of_replica) for one in classes)
    shown = {item.kind for view in views for bar in view.phases for item in bar.items}
    return MemoryView(
        capacity=bytes_text(capacity),
        capacity_at=round(100 * capacity / scale, 2),
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
        devices=range_text(one.devices),
        number=plural(len(one.devices), "device"),
        phases=tuple(
            PhaseBar(
                phase=row.phase,
                total=bytes_text(row.total),
                share=share_text(row.total / capacity),
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
                    size=bytes_text(size),
                )
            left += width
