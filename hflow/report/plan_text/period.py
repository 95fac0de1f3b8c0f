"""The section on the period: the critical cycle, a chart, and idle shares."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from hflow.planner.forecast import Period
from hflow.planner.ir import Plan
from hflow.report.formatting import plural, seconds_text
from hflow.report.plan_text.gantt import gantt
from hflow.report.plan_text.header import step_name
from hflow.report.plan_text.section import NO_FIGURES, Section, add_row, number, table, text

MOST_CYCLE_ROWS = 10
NOTE = (
    "Seconds a step once the run is in its stride. They come from the slowest cycle, in which each node "
    "waits for the one before it: to be faster, make one of these nodes faster or let it wait for less."
)


def period_section(plan: Plan, width: int) -> Section:
    """Return the critical cycle, a chart and idle shares."""
    if plan.forecast is None:
        return Section("Period", absent=NO_FIGURES)
    period = plan.forecast.period
    if period is None:
        return Section("Period", absent="the seconds of some nodes are not known")
    return Section("Period", NOTE, (_cycle(plan, period), Text(), *gantt(period, width)))


def _cycle(plan: Plan, period: Period) -> Table:
    shown = table(text("slowest cycle"), number("seconds"), text("leads to the next by"))
    for name, seconds, why in _rows(plan, period):
        add_row(shown, Text(name, "bold"), seconds, why)
    add_row(shown, "together", *_sum(period))
    return shown


def _rows(plan: Plan, period: Period) -> Iterator[tuple[str, str, str]]:
    cycle = period.cycle
    for step in cycle[:MOST_CYCLE_ROWS]:
        yield step_name(plan, step.node), seconds_text(step.seconds), step.why
    rest = cycle[MOST_CYCLE_ROWS:]
    if rest:
        seconds = seconds_text(sum(step.seconds for step in rest))
        yield f"and {plural(len(rest), 'more node')}", seconds, rest[-1].why


def _sum(period: Period) -> tuple[str, str]:
    """Return the seconds around the cycle, and the number of steps that they cover."""
    whole, lag = sum(step.seconds for step in period.cycle), sum(step.lag for step in period.cycle)
    if lag == 1:
        return seconds_text(whole), "around the cycle, once a step"
    a_step = seconds_text(period.seconds)
    return seconds_text(whole), f"around the cycle, once in {plural(lag, 'step')}: {a_step} a step"
