"""The sections on time: seconds of each node, and the period with its critical cycle."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from hflow.planner.forecast.figures import step_seconds
from hflow.planner.plan.forecast import NodeTime, Period
from hflow.planner.plan.rows import Plan, ScheduledNode
from hflow.report.formatting import plural, seconds_text
from hflow.report.plan_text.gantt import gantt
from hflow.report.plan_text.graph import cadence
from hflow.report.plan_text.header import step_name
from hflow.report.plan_text.section import NO_FIGURES, Section, add_row, dim, number, table, text

MOST_NODES = 20
LEAST_PART = 0.005
"""Parts with a smaller share of a node's seconds are not named."""
NEW_WEIGHTS = "new weights"
"""What an engine's row shows: loading the weights that were trained."""
TIME_NOTE = (
    "Seconds of one execution (of a stream's source: of a whole batch), their parts, and what limits "
    "most of these seconds."
)


def times_section(plan: Plan, width: int) -> Section:
    """Return a row for each node in the order of execution; of very many, the slowest."""
    if plan.forecast is None:
        return Section("Time", absent=NO_FIGURES)
    if not plan.forecast.times:
        return Section("Time", absent="the seconds of no node are known")
    shown = table(text("node"), text("per"), number("seconds"), text("of which"), text("limited by"))
    fires = _fires(plan)
    rank = {name: i for i, name in enumerate(fires)}
    slowest = sorted(plan.forecast.times, key=lambda row: -row.seconds)[:MOST_NODES]
    for row in sorted(slowest, key=lambda row: rank.get(row.node, len(rank))):
        per, limit = fires.get(row.node, NEW_WEIGHTS), row.limit if row.seconds else ""
        add_row(shown, Text(row.node, "bold"), per, seconds_text(row.seconds), _parts(row), limit)
    more = len(plan.forecast.times) - len(slowest)
    rest = (dim(f"and {plural(more, 'faster node')}"),) if more else ()
    return Section("Time", TIME_NOTE, (shown, *rest))


def _fires(plan: Plan) -> dict[str, str]:
    """Return what each node is executed for, in the order of the schedule."""
    batches = {s.source: "batch" if s.batch else "evaluation" for s in plan.schedule.streams}
    return batches | {node.name: _per(node, plan.schedule.num_steps) for node in plan.schedule.nodes}


def _per(node: ScheduledNode, num_steps: int) -> str:
    if node.at_end and node.every >= num_steps:
        return f"{node.level}, at the end"
    return f"{node.level}{cadence(node.every, node.after)}"


def _parts(row: NodeTime) -> str:
    named = [(name, spent) for name, spent in row.parts if spent >= LEAST_PART * row.seconds and spent > 0]
    if len(named) == 1:
        return named[0][0]
    return ", ".join(f"{name} {seconds_text(spent)}" for name, spent in named)


MOST_CYCLE_ROWS = 10
PERIOD_NOTE = (
    "Seconds per step in the steady state. The slowest cycle decides them, in which each node waits for the "
    "one before it. For a faster run, make one of these nodes faster or let it wait for less."
)


def period_section(plan: Plan, width: int) -> Section:
    """Return the critical cycle, a chart and idle shares."""
    if plan.forecast is None:
        return Section("Period", absent=NO_FIGURES)
    period = plan.forecast.period
    if period is None:
        return Section("Period", absent="the seconds of some nodes are not known")
    note = PERIOD_NOTE
    if period.simulated is not None:
        note += " Cycle and chart leave out waiting for late responses; idle shares count it."
    elif step_seconds(plan)[1]:
        note += " Waiting for late responses is left out, also of idle shares."
    return Section("Period", note, (_cycle(plan, period), Text(), *gantt(period, width)))


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
