"""`render_plan`: the report of `hflow plan` on a terminal, one file per section."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text

from hflow.planner.plan.rows import Plan
from hflow.report.tables import data_table, placements_table, times_table, weights_table
from hflow.report.text.graph import graph_section
from hflow.report.text.plan.assumptions import assumptions_section
from hflow.report.text.plan.data import routing_section, samples_section
from hflow.report.text.plan.devices import devices_section, replicas_section, turns_section
from hflow.report.text.plan.header import header
from hflow.report.text.plan.memory import memory_section
from hflow.report.text.plan.time import period_section
from hflow.report.text.section import Report, Section, dim, limit_text, shown, table_section

__all__ = ["render_plan"]


MOST_NODES = 20
"""Number of nodes whose seconds are listed: the slowest."""


SECTIONS: Sequence[Callable[[Plan, int], Section]] = (
    graph_section,
    replicas_section,
    devices_section,
    turns_section,
    routing_section,
    lambda plan, width: table_section(data_table(plan, assumptions="below")),
    lambda plan, width: table_section(weights_table(plan)),
    memory_section,
    lambda plan, width: table_section(times_table(plan, MOST_NODES)),
    period_section,
    samples_section,
    assumptions_section,
)
"""In the order in which a reader asks: what, where, bytes, memory, speed, staleness, assumptions."""


def render_plan(plan: Plan) -> RenderableType:
    """Return the report of a plan, as wide as its console and at most `WIDEST` columns."""

    def parts(width: int) -> Iterator[RenderableType]:
        yield header(plan)
        sections = [make(plan, width) for make in SECTIONS]
        if plan.forecast.candidates:
            sections.insert(0, table_section(placements_table(plan)))
        for absent, same in groupby(sections, key=lambda section: section.absent):
            if absent:
                yield Text()
                yield dim(f"{', '.join(section.title for section in same)}: left out, as {absent}.")
            else:
                for section in same:
                    yield from shown(section)
        for limit in plan.forecast.limits:
            yield Text(f"\nlimit: {limit_text(limit)}", style="yellow")
        for reason in plan.unrunnable:
            yield Text(f"\ncannot run: {reason}", style="bold red")
        for warning in plan.warnings:
            yield Text(f"\nwarning: {warning}", style="yellow")

    return Report(parts)
