"""The sections on replicas, devices (machines as rows, devices as cells with their replicas) and turns.

A small cluster shows the coordinates of every device. In a large one, equal machines share a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from rich.table import Table
from rich.text import Text

from hflow.base.text import format_ranges_briefly
from hflow.graph.ir import Level
from hflow.planner.plan.routing import rank_order
from hflow.planner.plan.rows import DeviceGroup, Plan
from hflow.report.tables import replicas_table
from hflow.report.text.section import Section, add_row, dim, drawn_cell, table, text
from hflow.shapes.layout import Layout

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def replicas_section(plan: Plan, width: int) -> Section:
    """Return a row for each replica, with its letter in the device grid."""
    view = replicas_table(plan)
    drawn = table(*map(text, ("", *view.columns)))
    marks, colours = marks_of(plan), group_colours(plan)
    for replica, cells in zip(plan.replicas, view.rows, strict=True):
        mark = Text(marks[replica.name], f"bold {colours[replica.groups[0]]}")
        groups = Text(", ").join(Text(name, colours[name]) for name in replica.groups)
        shown = dict(zip(view.columns, map(drawn_cell, cells), strict=True)) | {"group": groups}
        add_row(drawn, mark, *shown.values())
    return Section(view.title, view.note, (drawn, *map(dim, view.after)))


def marks_of(plan: Plan) -> dict[str, str]:
    """Return a letter per replica; replicas with equal layouts on the same devices share one."""
    marks: dict[tuple[object, ...], str] = {}
    mark_of = {}
    for replica in plan.replicas:
        key = (replica.layout, rank_order(replica.role), replica.workers)
        mark_of[replica.name] = marks.setdefault(key, _mark(len(marks)))
    return mark_of


def group_colours(plan: Plan) -> dict[str, str]:
    """Return the colour of each device group."""
    return {group.name: COLOURS[i % len(COLOURS)] for i, group in enumerate(plan.groups)}


def _mark(i: int) -> str:
    suffix, letter = divmod(i, len(ascii_uppercase))
    return ascii_uppercase[letter] + (str(suffix) if suffix else "")


TURNS_NOTE = (
    "Replicas on the same devices take turns, in the same order in every step, so that all ranks "
    "agree on the order of collectives. [Brackets]: the engine that generates before the batch is formed."
)


def turns_section(plan: Plan, width: int) -> Section:
    """Return a row for each device group."""
    shown = table(text("group"), text("devices"), text("turns of each step"))
    colours = group_colours(plan)
    for group in plan.groups:
        name = Text(group.name, f"bold {colours[group.name]}")
        add_row(shown, name, format_ranges_briefly(group.devices), _turns(plan, group))
    return Section("Device groups", TURNS_NOTE, (shown,))


def _turns(plan: Plan, group: DeviceGroup) -> str:
    order = dict(plan.schedule.orders).get(group.name, ())
    arriving = [n.name for n in plan.schedule.nodes if n.level is not Level.BATCH and group.name in n.groups]
    if not order and arriving:
        return f"{', '.join(arriving)}, as samples and groups arrive"
    opening = [f"[{engine}]" for engine in dict(plan.schedule.shared).get(group.name, ())]
    if not order and opening:
        return f"{' → '.join(opening)} → idle while others train → again (lag 1)"
    if not order:
        engines = [r.name for r in plan.replicas if group.name in r.groups and r.role == "gen"]
        return f"[{', '.join(engines)}] all the time" if engines else "nothing runs here"
    return " → ".join((*opening, *order, "again (lag 1)"))


MOST_DEVICES = 64
"""Largest cluster, in devices, whose coordinates are shown one by one."""
MOST_LINES = 24
LABEL = 16
"""Width of a row's name, in columns."""
UNUSED = "·"
NOTE = (
    "Letters are those of the replicas above; A d1t0 is the part of A at data rank 1 and tensor rank 0 "
    "(axes of size 1 are left out)."
)
FOLDED = "Letters are those of the replicas above; equal machines share a row."

Coords = tuple[tuple[str, int], ...]
"""(axis, index) of the axes with more than one rank."""


@dataclass(frozen=True)
class DevicePart:
    """The part of replicas with equal layout that one device holds."""

    mark: str
    coords: Coords

    @property
    def label(self) -> str:
        """`A d1t0`."""
        return f"{self.mark} {''.join(f'{axis}{index}' for axis, index in self.coords)}".rstrip()


PartsOf = Mapping[int, Sequence[DevicePart]]
"""Device -> its parts."""


def devices_section(plan: Plan, width: int) -> Section:
    """Return the grid, with coordinates if there is room."""
    parts_of = _parts_of(plan)
    cluster = plan.cluster
    deepest = max((len(parts) for parts in parts_of.values()), default=1)
    cell = max((len(part.label) for parts in parts_of.values() for part in parts), default=1) + 2
    per_line = _per_line(cluster.devices_per_node, width - LABEL, cell)
    num_lines = cluster.num_nodes * deepest * -(-cluster.devices_per_node // per_line)
    if cluster.num_devices <= MOST_DEVICES and num_lines <= MOST_LINES:
        return Section("Devices", NOTE, (_grid(plan, parts_of, per_line, cell, deepest),))
    return Section("Devices", FOLDED, (_folded(plan, parts_of, width),))


def _parts_of(plan: Plan) -> PartsOf:
    """Return each device's parts, one per mark."""
    marks = marks_of(plan)
    distinct = {marks[replica.name]: replica for replica in reversed(plan.replicas)}
    parts_of: dict[int, list[DevicePart]] = {device: [] for group in plan.groups for device in group.devices}
    for mark in sorted(distinct, key=lambda mark: (len(mark), mark)):
        replica = distinct[mark]
        order = rank_order(replica.role)
        for rank, worker in enumerate(replica.workers):
            coords = _cut(replica.layout, replica.layout.coords(order, rank))
            parts_of.setdefault(worker, []).append(DevicePart(mark, coords))
    return parts_of


def _cut(layout: Layout, coords: tuple[int, ...]) -> Coords:
    return tuple((axis, i) for axis, i, size in zip("dtpc", coords, layout.sizes, strict=True) if size > 1)


def _per_line(num_devices: int, room: int, cell: int) -> int:
    """Return the cells per line: all devices of a machine, or the largest divisor that fits."""
    fitting = (n for n in range(num_devices, 0, -1) if num_devices % n == 0 and n * cell <= room)
    return next(fitting, 1)


def _grid(plan: Plan, parts_of: PartsOf, per_line: int, cell: int, deepest: int) -> Table:
    """Return a table with one line for each row of cells and each mark on it."""
    shown = Table.grid(padding=0)
    shown.add_column(width=LABEL)
    for _ in range(per_line):
        shown.add_column(width=cell, no_wrap=True)
    styles = _styles(plan)
    for first in range(0, plan.cluster.num_devices, per_line):
        devices = range(first, first + per_line)
        for level in range(deepest):
            parts = [_part(parts_of, device, level) for device in devices]
            if level and not any(parts):
                continue
            name = f"machine {plan.cluster.node_of(first)}" if level == 0 else ""
            starts_machine = first % plan.cluster.devices_per_node == 0
            cells = [Text(part, styles.get(d, "dim")) for d, part in zip(devices, parts, strict=True)]
            shown.add_row(Text(name if starts_machine else "", "dim"), *cells)
    return shown


def _part(parts_of: PartsOf, device: int, level: int) -> str:
    parts = parts_of.get(device, ())
    if level < len(parts):
        return parts[level].label
    return UNUSED if level == 0 else ""


def _styles(plan: Plan) -> dict[int, str]:
    colours = group_colours(plan)
    return {device: colours[group.name] for group in plan.groups for device in group.devices}


def _folded(plan: Plan, parts_of: PartsOf, width: int) -> Table:
    """Return a row for each run of machines with equal content: their cells and coordinates."""
    shown = Table.grid(padding=(0, 2))
    shown.add_column(width=LABEL)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    styles, size = _styles(plan), plan.cluster.devices_per_node
    runs = _runs(plan, parts_of)
    for first, last in runs[: MOST_LINES // 2]:
        devices = range(first * size, (last + 1) * size)
        name = f"machine {first}" if first == last else f"machines {first}-{last}"
        cells = _cells(parts_of, range(first * size, (first + 1) * size), styles, width)
        shown.add_row(Text(name, "dim"), cells, _boxes(parts_of, devices))
    more = runs[MOST_LINES // 2 :]
    if more:
        shown.add_row(Text(f"... and machines {more[0][0]}-{more[-1][1]}", "dim"))
    return shown


def _runs(plan: Plan, parts_of: PartsOf) -> list[tuple[int, int]]:
    """Return the (first, last) machine of each run; pipeline stages separate runs only if few runs result."""
    by_stage = list(_equal_runs(plan, parts_of, with_stage=True))
    return (
        by_stage if len(by_stage) <= MOST_LINES // 2 else list(_equal_runs(plan, parts_of, with_stage=False))
    )


def _equal_runs(plan: Plan, parts_of: PartsOf, with_stage: bool) -> Iterator[tuple[int, int]]:
    """Yield the (first, last) machine of each run with equal replicas and, if asked, equal stages."""
    size, first, before = plan.cluster.devices_per_node, 0, None
    for machine in range(plan.cluster.num_nodes):
        devices = range(machine * size, (machine + 1) * size)
        content = [
            [(p.mark, with_stage and dict(p.coords).get("p")) for p in parts_of.get(d, ())] for d in devices
        ]
        if before is not None and content != before:
            yield first, machine - 1
            first = machine
        before = content
    yield first, plan.cluster.num_nodes - 1


def _cells(parts_of: PartsOf, devices: Sequence[int], styles: Mapping[int, str], width: int) -> Text:
    """Return the marks of each device; neighbours are joined if the cells do not fit."""
    marks = ["".join(part.mark for part in parts_of.get(device, ())) or UNUSED for device in devices]
    cells = Text(" ").join(Text(m, styles.get(d, "dim")) for d, m in zip(devices, marks, strict=True))
    if len(cells) <= width // 3:
        return cells
    distinct = list(dict.fromkeys(marks))
    return Text(", ".join(f"{marks.count(mark)} x {mark}" for mark in distinct))


def _boxes(parts_of: PartsOf, devices: Iterable[int]) -> Text:
    """`A d0-127 t0-3 p0`: the coordinates on these devices, one line per mark."""
    indices: dict[str, dict[str, set[int]]] = {}
    for device in devices:
        for part in parts_of.get(device, ()):
            axes = indices.setdefault(part.mark, {})
            for axis, index in part.coords:
                axes.setdefault(axis, set()).add(index)
    rows = (
        (mark, *(f"{axis}{format_ranges_briefly(sorted(at))}" for axis, at in axes.items()))
        for mark, axes in indices.items()
    )
    return Text("\n".join(" ".join(row) for row in rows))
