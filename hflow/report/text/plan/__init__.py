"""`render_plan`: the report of `hflow plan` on a terminal, one file per section."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from hflow.planner.plan.rows import Plan
from hflow.report.tables import data_table, placements_table, times_table, weights_table
from hflow.report.text.plan.assumptions import assumptions_section
from hflow.report.text.plan.data import routing_section, samples_section
from hflow.report.text.plan.devices import devices_section, replicas_section, turns_section
from hflow.report.text.plan.graph import graph_section
from hflow.report.text.plan.header import header
from hflow.report.text.plan.memory import memory_section
from hflow.report.text.plan.time import period_section
from hflow.report.text.section import WIDEST, Section, dim, limit_text, shown, table_section

__all__ = ["render_plan"]


MOST_NODES = 20
"""Number of nodes whose seconds are listed: the slowest."""


def data_section(plan: Plan, width: int) -> Section:
    """Return a row for each node that reads fields."""
    return table_section(data_table(plan, assumptions="below"))


def weights_section(plan: Plan, width: int) -> Section:
    """Return a row for each weight route."""
    return table_section(weights_table(plan))


def times_section(plan: Plan, width: int) -> Section:
    """Return a row for each node, with its seconds."""
    return table_section(times_table(plan, MOST_NODES))


SECTIONS: Sequence[Callable[[Plan, int], Section]] = (
    graph_section,
    replicas_section,
    devices_section,
    turns_section,
    routing_section,
    data_section,
    weights_section,
    memory_section,
    times_section,
    period_section,
    samples_section,
    assumptions_section,
)
"""In the order in which a reader asks: what, where, bytes, memory, speed, staleness, assumptions."""


class PlanReport:
    """A plan as something that rich can print at any width."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the parts at the width of the console."""
        width = min(options.max_width, WIDEST)
        for part in self._parts(width):
            yield from console.render(part, options.update(width=width))

    def _parts(self, width: int) -> Iterator[RenderableType]:
        yield header(self._plan)
        sections = [make(self._plan, width) for make in SECTIONS]
        if self._plan.forecast.candidates:
            sections.insert(0, table_section(placements_table(self._plan)))
        for absent, same in groupby(sections, key=lambda section: section.absent):
            if absent:
                yield Text()
                yield dim(f"{', '.join(section.title for section in same)}: left out, as {absent}.")
            else:
                for section in same:
                    yield from shown(section)
        for limit in self._plan.forecast.limits:
            yield Text(f"\nlimit: {limit_text(limit)}", style="yellow")
        for reason in self._plan.unrunnable:
            yield Text(f"\ncannot run: {reason}", style="bold red")
        for warning in self._plan.warnings:
            yield Text(f"\nwarning: {warning}", style="yellow")


def render_plan(plan: Plan) -> RenderableType:
    """Return the report of a plan, as wide as its console and at most `WIDEST` columns."""
    return PlanReport(plan)
