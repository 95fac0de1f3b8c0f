"""The device groups, and the turns that are taken on each."""

from __future__ import annotations

from rich.text import Text

from hflow.plan.ir import DeviceGroup, Level, Plan
from hflow.report.plan_text.replicas import group_colours
from hflow.report.plan_text.section import Section, add_row, table, text
from hflow.report.words import range_text

NOTE = (
    "Replicas on the same devices take turns, in the same order in every step, so that all ranks start "
    "their collectives alike. [Brackets]: the engine that generates before the batch is formed."
)


def turns_section(plan: Plan, width: int) -> Section:
    """A row for each group of devices."""
    shown = table(text("group"), text("devices"), text("turns of each step"))
    colours = group_colours(plan)
    for group in plan.groups:
        name = Text(group.name, f"bold {colours[group.name]}")
        add_row(shown, name, range_text(group.devices), _turns(plan, group))
    return Section("Device groups", NOTE, (shown,))


def _turns(plan: Plan, group: DeviceGroup) -> str:
    order = dict(plan.schedule.orders).get(group.name, ())
    arriving = [n.name for n in plan.schedule.nodes if n.level is not Level.BATCH and n.group == group.name]
    if not order and arriving:
        return f"{', '.join(arriving)}, as samples and groups arrive"
    if not order:
        engines = [r.name for r in plan.replicas if r.group == group.name and r.role == "gen"]
        return f"[{', '.join(engines)}] all the time" if engines else "nothing runs here"
    opening = [f"[{engine}]" for engine in dict(plan.schedule.shared).get(group.name, ())]
    return " → ".join((*opening, *order, "again (lag 1)"))
