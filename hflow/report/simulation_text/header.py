"""The head of the report: speed next to what the plan says and what is possible, and what was lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hflow.report.plan_text.header import staleness_line
from hflow.report.words import count_text, plural, seconds_text, share_text

if TYPE_CHECKING:
    from hflow.runtime.simulate_plan import Simulation

DROPS = ("stale", "queue_full")
"""Reasons that a rule about time gives, whatever the sample is."""


def header(simulation: Simulation) -> Panel:
    """A frame with one line for each thing that a reader asks first."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for label, value in _rows(simulation):
        grid.add_row(label, value)
    plan = simulation.plan
    title = Text(f"{plan.recipe} on {plan.cluster.name}, on a virtual clock", style="bold")
    return Panel(grid, title=title, box=box.ROUNDED)


def _rows(simulation: Simulation) -> Iterator[tuple[str, Text]]:
    run, period = simulation.run, simulation.period
    steps, planned_steps = simulation.num_steps, simulation.plan.schedule.num_steps
    yield (
        "simulated",
        Text(f"{steps:,} of {plural(planned_steps, 'step')}, seed {simulation.seed}; no evaluations"),
    )
    speed = f" a step: {count_text(1 / period)} steps/s, {count_text(run.samples_per_second)} samples/s"
    yield "speed", Text.assemble((seconds_text(period), "bold"), speed)
    yield "plan's period", Text(_planned(simulation))
    yield "limit", Text(_limit(simulation))
    yield "idle", Text(", ".join(f"{lane} {share_text(share)}" for lane, share in run.idle))
    yield "staleness", Text(_staleness(simulation))
    yield "interrupted", Text(_interrupted(simulation))
    for label, is_drop in (("refused", False), ("dropped", True)):
        yield label, Text(_lost(simulation, is_drop=is_drop))


def _planned(simulation: Simulation) -> str:
    forecast = simulation.plan.forecast
    period = forecast.period if forecast else None
    if period is None:
        return "unknown"
    more = round(100 * (simulation.period / period.seconds - 1), 1)
    compared = f"{abs(more):g} % {'more' if more > 0 else 'less'}" if more else "as much"
    return f"{seconds_text(period.seconds)} a step; the simulated step takes {compared}"


def _limit(simulation: Simulation) -> str:
    generation, training = map(seconds_text, (simulation.generation_alone, simulation.training_alone))
    how = "the sum, on shared devices, of" if simulation.plan.schedule.shared else "the larger of"
    return (
        f"{seconds_text(simulation.limit)} a step, {how} generation alone {generation} and training alone "
        f"{training}; {share_text(simulation.limit / simulation.period)} of that speed is reached"
    )


def _staleness(simulation: Simulation) -> str:
    found = simulation.run.staleness()
    certificate = staleness_line(simulation.plan)
    if not found:
        return f"none: nothing is generated ({certificate})"
    mean = sum(lag * num for lag, num in found.items()) / sum(found.values())
    return f"{count_text(mean)} on average, {max(found)} at most; by the plan {certificate}"


def _interrupted(simulation: Simulation) -> str:
    times, tokens = simulation.run.interruptions, simulation.tokens_kept
    if not times:
        return "none"
    return f"{plural(times, 'time')}; {count_text(round(tokens))} tokens were kept, and not drawn again"


def _lost(simulation: Simulation, *, is_drop: bool) -> str:
    rows = [(reason, num) for reason, num in simulation.run.refused if (reason in DROPS) == is_drop]
    return ", ".join(f"{plural(num, 'sample')} {reason}" for reason, num in rows) or "none"
