"""The section on replicas: each copy of a model, its layout and its devices."""

from __future__ import annotations

from string import ascii_uppercase

from rich.text import Text

from hflow.planner.ir import Plan
from hflow.planner.model_shape import num_parameters
from hflow.planner.routing import rank_order
from hflow.report.formatting import parameters_text, range_text
from hflow.report.plan_text.section import Section, add_row, dim, table, text

NOTE = (
    "A replica is one copy of a model. Its layout cuts it: d ways over data, t ways inside tensors, p ways "
    "into pipeline stages. A dp-head takes in the samples of its data rank and gives out the results."
)
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def replicas_section(plan: Plan, width: int) -> Section:
    """Return a row for each replica, with its letter in the device grid."""
    names = ("", "replica", "parameters", "backend", "layout", "group", "devices", "dp-heads")
    shown = table(*map(text, names))
    shapes, marks, colours = dict(plan.shapes), marks_of(plan), group_colours(plan)
    for replica in plan.replicas:
        colour = colours[replica.group]
        size = num_parameters(shapes[replica.model]) if replica.model in shapes else None
        add_row(
            shown,
            Text(marks[replica.name], f"bold {colour}"),
            Text(replica.name, "bold"),
            "unknown" if size is None else parameters_text(size),
            replica.backend,
            str(replica.layout),
            Text(replica.group, colour),
            range_text(replica.workers),
            range_text(replica.heads),
        )
    return Section("Replicas", NOTE, (shown, *_chosen(plan)))


def _chosen(plan: Plan) -> list[Text]:
    """Return why replicas have the layouts that the planner chose."""
    whys = plan.forecast.layouts if plan.forecast is not None else ()
    return [dim(f"{name} is {plan.replica(name).layout}: {why}.") for name, why in whys]


def marks_of(plan: Plan) -> dict[str, str]:
    """Return a letter per replica; replicas with equal layouts on the same devices share one."""
    marks: dict[tuple[object, ...], str] = {}
    found = {}
    for replica in plan.replicas:
        key = (replica.layout, rank_order(replica.role), replica.workers)
        found[replica.name] = marks.setdefault(key, _mark(len(marks)))
    return found


def group_colours(plan: Plan) -> dict[str, str]:
    """Return the colour of each device group."""
    return {group.name: COLOURS[i % len(COLOURS)] for i, group in enumerate(plan.groups)}


def _mark(i: int) -> str:
    turn, letter = divmod(i, len(ascii_uppercase))
    return ascii_uppercase[letter] + (str(turn) if turn else "")
