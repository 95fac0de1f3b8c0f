"""The section on memory: for each class of equal devices, a bar per phase against the capacity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hflow.base.devices import is_gpu
from hflow.base.text import format_bytes, format_ranges_briefly, format_seconds, format_share, pluralize
from hflow.planner.forecast.communicators import communicators
from hflow.planner.forecast.memory import pinning_seconds
from hflow.planner.plan.forecast import HostMemory, MemoryCategory, MemoryItem, PhaseMemory
from hflow.planner.plan.rows import Plan
from hflow.report.text.section import GAP, Section, dim, number, table, text


@dataclass(frozen=True)
class DeviceClass:
    """Devices that hold the same in every phase."""

    devices: tuple[int, ...]
    phases: tuple[PhaseMemory, ...]

    @property
    def peak(self) -> PhaseMemory:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)


def device_classes(rows: Sequence[PhaseMemory]) -> tuple[DeviceClass, ...]:
    """Devices with equal rows together, in the order in which the rows name them first."""
    equal: dict[tuple[Any, ...], int] = {}
    of_device: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        same = equal.setdefault((row.group, row.phase, row.resident, row.transient), i)
        for device in row.devices:
            of_device.setdefault(device, []).append(same)
    together: dict[tuple[int, ...], list[int]] = {}
    for device, indices in of_device.items():
        together.setdefault(tuple(indices), []).append(device)
    return tuple(
        DeviceClass(tuple(sorted(devices)), tuple(rows[i] for i in indices))
        for indices, devices in together.items()
    )


LETTERS = dict(zip(MemoryCategory, "wgoalkbr", strict=True))
COLOURS = {
    MemoryCategory.WEIGHTS: "cyan",
    MemoryCategory.GRADIENTS: "magenta",
    MemoryCategory.OPTIMIZER: "blue",
    MemoryCategory.ACTIVATIONS: "green",
    MemoryCategory.LOGITS: "yellow",
    MemoryCategory.KV_CACHE: "red",
    MemoryCategory.BUFFERS: "dark_orange3",
    MemoryCategory.RUNTIME: "bright_black",
}
FREE, LIMIT = "·", "|"


def memory_bar(phase: PhaseMemory, scale: int, capacity: int, width: int) -> Text:
    """Return the bar of one phase, `scale` bytes in `width` columns; `|` is the capacity in a longer one."""
    bar, filled, end = Text(), 0.0, 0
    for items, is_resident in ((phase.resident, True), (phase.transient, False)):
        for category, size in _by_category(items):
            filled += size
            start, end = end, round(filled / scale * width)
            letter = LETTERS[category].upper() if is_resident else LETTERS[category]
            bar.append(letter * (end - start), COLOURS[category])
    bar.append(FREE * (width - end), "dim")
    if scale <= capacity:
        return bar
    at = round(capacity / scale * width)
    return Text.assemble(bar[:at], (LIMIT, "bold red"), bar[at + 1 :])


def legend(used: Container[MemoryCategory]) -> Text:
    """Return the letters of the categories that occur."""
    categories = (category for category in MemoryCategory if category in used)
    return Text("  ").join(Text.assemble((LETTERS[c], COLOURS[c]), f" {c}") for c in categories)


def _by_category(items: Iterable[MemoryItem]) -> list[tuple[MemoryCategory, int]]:
    """Return the bytes of each category that occurs, in the order of the categories."""
    sizes: dict[MemoryCategory, int] = {}
    for item in items:
        sizes[item.category] = sizes.get(item.category, 0) + item.num_bytes
    return [(category, sizes[category]) for category in MemoryCategory if category in sizes]


BUDGET = 22
"""Lines for classes that are shown with bars; the others have one line each, then a count."""
MOST_PHASES = 10
MOST_WITHOUT_BARS = 4
WIDEST_BAR = 60
NOTE = (
    "What one device holds at the peak of each phase of a step. Capital letters stay through all phases, "
    "small ones are that phase's own, dots are free. * marks the fullest."
)


def memory_section(plan: Plan, width: int) -> Section:
    """Return the fullest class of each group in full, if there is room, and one line per other class."""
    if not plan.forecast.memory:
        return Section("Memory", absent="the sizes of the models are not known")
    memory_of = plan.cluster.memory_of
    full, brief = _within_budget(device_classes(plan.forecast.memory))
    body: list[RenderableType] = []
    for shown in full:
        gap = [Text()] if body else []
        capacity = memory_of(shown.devices[0])
        body += [*gap, _title(shown, capacity), _bars(shown, capacity, width), _items(shown)]
    joined = list(communicator_lines(plan, full))
    if brief or plan.forecast.host or joined:
        body.append(Text())
    body += [dim(line) for line in _brief(brief, memory_of)]
    body += [dim(line) for line in (*_host_lines(plan.forecast.host), *joined)]
    used = {item.category for row in plan.forecast.memory for item in (*row.resident, *row.transient)}
    return Section("Memory", NOTE, (legend(used), Text(), *body))


def communicator_lines(plan: Plan, classes: Iterable[DeviceClass]) -> Iterator[str]:
    """Yield the NCCL communicators of a device of each class that is shown, by their use."""
    if not is_gpu(plan.cluster.device):
        return
    shown = {one.devices[0]: one for one in classes}
    for device, found in communicators(plan, shown).items():
        if found:
            number = pluralize(len(found), "NCCL communicator")
            uses = ", ".join(f"{use} {num}" for use, num in Counter(one.use for one in found).items())
            yield f"{_devices(shown[device].devices)}: {number}: {uses}"


def _host_lines(rows: Iterable[HostMemory]) -> Iterator[str]:
    """Yield what is in the memory of machines, largest first."""
    for row in rows:
        of_all = "" if row.capacity is None else f" of {format_bytes(row.capacity)}"
        items = sorted(row.items, key=lambda item: -item.num_bytes)
        words = ", ".join(f"{item.name} {format_bytes(item.num_bytes)}" for item in items)
        is_one = len(row.machines) == 1
        machines, each = ("machine", "") if is_one else ("machines", " each")
        size = f"{format_bytes(row.total)}{of_all}{each}"
        yield f"host memory of {machines} {format_ranges_briefly(row.machines)}: {size}: {words}"
        if seconds := pinning_seconds(row):
            yield f"copies of checkpoints are pinned once, in about {format_seconds(seconds)}"


def _within_budget(classes: Sequence[DeviceClass]) -> tuple[list[DeviceClass], list[DeviceClass]]:
    """Divide the classes into the fullest of each group, as far as there is room, and the rest, by peak."""
    full: dict[str, DeviceClass] = {}
    rest, used = [], 0
    for one in sorted(classes, key=lambda one: -one.peak.total):
        fits = not full or used + _num_lines(one) <= BUDGET
        if one.peak.group not in full and fits:
            full[one.peak.group] = one
            used += _num_lines(one)
        else:
            rest.append(one)
    return list(full.values()), rest


def _num_lines(shown: DeviceClass) -> int:
    """Count the lines: title, the table's head and its line, phases, items, a gap."""
    return 5 + min(MOST_PHASES, len(shown.phases))


def _title(shown: DeviceClass, capacity: int) -> Text:
    return Text.assemble(
        (f"group {shown.peak.group}", "bold"),
        f", {_devices(shown.devices)}: at most {format_bytes(shown.peak.total)} each, "
        f"{format_share(shown.peak.total / capacity)}",
    )


def _devices(devices: Sequence[int]) -> str:
    number = f" ({len(devices):,})" if len(devices) > 1 else ""
    return f"device{'s' if len(devices) > 1 else ''} {format_ranges_briefly(devices)}{number}"


def _bars(shown: DeviceClass, capacity: int, width: int) -> Table:
    fullest = sorted(shown.phases, key=lambda phase: -phase.total)[:MOST_PHASES]
    of_all = f"of {format_bytes(capacity)}"
    scale = _scale(shown.peak.total, capacity)
    rows = table(
        text(""), text("phase"), number("bytes"), number(of_all), text(f"0 to {format_bytes(scale)}")
    )
    names, sizes = zip(*((phase.phase, format_bytes(phase.total)) for phase in fullest), strict=True)
    other_columns = 1 + max(map(len, names)) + max(map(len, sizes)) + len(of_all) + 4 * GAP
    columns = max(1, min(WIDEST_BAR, width - other_columns))
    for phase in (phase for phase in shown.phases if phase in fullest):
        is_peak = phase is shown.peak
        style = ("bold red" if phase.total > capacity else "bold") if is_peak else ""
        rows.add_row(
            Text("*" if is_peak else "", style),
            Text(phase.phase, style),
            Text(format_bytes(phase.total), style),
            Text(format_share(phase.total / capacity), style),
            memory_bar(phase, scale, capacity, columns),
        )
    more = len(shown.phases) - len(fullest)
    if more:
        rows.add_row("", dim(f"and {pluralize(more, 'smaller phase')}"))
    return rows


def _scale(peak: int, capacity: int) -> int:
    """Return the bytes of a whole bar: the larger of capacity and peak, halved while all bars are short."""
    scale = max(peak, capacity)
    while scale > 2 * peak > 0:
        scale //= 2
    return scale


def _items(shown: DeviceClass) -> Text:
    """Return the items of the fullest phase, largest first."""
    items = sorted((*shown.peak.resident, *shown.peak.transient), key=lambda item: -item.num_bytes)
    words = ", ".join(f"{item.name} {format_bytes(item.num_bytes)}" for item in items if item.num_bytes)
    return Text.assemble(dim(f"* {shown.peak.phase}: "), words)


def _brief(classes: Sequence[DeviceClass], memory_of: Callable[[int], int]) -> Iterator[str]:
    for one in classes[:MOST_WITHOUT_BARS]:
        peak, of_all = one.peak, format_share(one.peak.total / memory_of(one.devices[0]))
        most = f"at most {format_bytes(peak.total)}, {of_all}"
        yield f"group {peak.group}, {_devices(one.devices)}: {most}, in {peak.phase}"
    rest = classes[MOST_WITHOUT_BARS:]
    if rest:
        shares = [(one.peak.total / memory_of(one.devices[0]), one.peak.total) for one in rest]
        share, num_bytes = max(shares)
        number = sum(len(one.devices) for one in rest)
        others = pluralize(number, "other device")
        yield f"{others}: at most {format_bytes(num_bytes)}, {format_share(share)}"
