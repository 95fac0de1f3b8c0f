"""The report of `hflow simulate`: speed, staleness, idle devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.panel import Panel
from rich.text import Text

from hflow.base.text import format_count, format_seconds, format_share, pluralize
from hflow.planner.forecast.figures import step_seconds
from hflow.planner.plan.forecast import Period, Slot
from hflow.report.text.plan.header import staleness_line
from hflow.report.text.plan.time import gantt
from hflow.report.text.section import Report, Section, add_row, frame, number, shown, table, text

if TYPE_CHECKING:
    from hflow.runtime.simulation.simulate_plan import Simulation
    from hflow.workers.interface import Span


STALENESS_NOTE = (
    "Updates between the weights of a sample's oldest token and the step that trained it: while it was "
    "generated (in flight), and while it waited for its batch (in queue). Means over the samples of each lag."
)
IN_FLIGHT, IN_QUEUE = "▒", "█"
WIDEST_BAR = 40
NUMBERS = 50
"""Width of the numbers beside a bar, in columns."""


def staleness_section(simulation: Simulation, width: int) -> Section:
    """Return a row for each lag."""
    rows: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row in simulation.run.lags:
        rows[row.in_flight + row.in_queue].append((row.in_flight, row.num_samples))
    if not rows:
        return Section("Staleness", absent="nothing is generated")
    totals = {lag: sum(num for _, num in parts) for lag, parts in rows.items()}
    room = max(1, min(WIDEST_BAR, width - NUMBERS))
    lag_table = table(
        number("lag"), number("samples"), number("share"), number("in flight"), number("in queue"), text("")
    )
    for lag, parts in sorted(rows.items()):
        in_flight = sum(flight * num for flight, num in parts) / totals[lag]
        columns = round(room * totals[lag] / max(totals.values()))
        cells = (format_count(part) for part in (in_flight, lag - in_flight))
        share = format_share(totals[lag] / sum(totals.values()))
        add_row(lag_table, str(lag), f"{totals[lag]:,}", share, *cells, _bar(columns, in_flight, lag))
    legend = Text.assemble((IN_FLIGHT, "yellow"), " in flight  ", (IN_QUEUE, "cyan"), " in queue, or fresh")
    return Section("Staleness", STALENESS_NOTE, (lag_table, legend))


def _bar(columns: int, in_flight: float, lag: int) -> Text:
    flight = round(columns * in_flight / lag) if lag else 0
    return Text.assemble((IN_FLIGHT * flight, "yellow"), (IN_QUEUE * (columns - flight), "cyan"))


NUM_STEPS = 4
"""Number of steps in the chart."""
CHART_NOTE = "Steps from the middle of the run. Idle shares are those of the whole simulation."


def chart_section(simulation: Simulation, width: int) -> Section:
    """Return a lane for each device group and engine; bars of an engine show when it generates."""
    ends = simulation.run.timeline.step_ends
    first = len(ends) // 2
    num_steps = min(NUM_STEPS, len(ends) - 1 - first)
    start, end = ends[first], ends[first + num_steps]
    window = Period(
        seconds=(end - start) / num_steps,
        cycle=(),
        slots=tuple(_slots(simulation, start, end)),
        idle=simulation.run.idle,
        num_steps=num_steps,
    )
    return Section("Some steps", CHART_NOTE, tuple(gantt(window, width)))


def _slots(simulation: Simulation, start: float, end: float) -> Iterator[Slot]:
    """Yield what runs between two moments, cut to them."""
    replicas = simulation.plan.schedule.streams[0].replicas
    batch_nodes = (span for span in simulation.run.timeline.spans if span.lane not in replicas)
    for span in sorted((*batch_nodes, *simulation.run.generating), key=lambda span: span.start):
        if span.start < end and span.end > start:
            first = max(span.start, start)
            yield Slot(_name(simulation, span), span.lane, first - start, min(span.end, end) - first)


def _name(simulation: Simulation, span: Span) -> str:
    stream = simulation.plan.schedule.streams[0]
    return stream.source if span.name in stream.replicas else span.name


DROPS = ("stale", "queue_full")
"""Reasons for drops, which concern time and not the sample."""


def header(simulation: Simulation) -> Panel:
    """Return speed, staleness and losses of the simulated run."""
    plan = simulation.plan
    return frame(f"{plan.recipe} on {plan.cluster.name}, on a virtual clock", _rows(simulation))


def _rows(simulation: Simulation) -> Iterator[tuple[str, Text]]:
    run, period = simulation.run, simulation.period
    steps, planned_steps = simulation.num_steps, simulation.plan.schedule.num_steps
    yield (
        "simulated",
        Text(f"{steps:,} of {pluralize(planned_steps, 'step')}, seed {simulation.seed}; no evaluations"),
    )
    speed = f" a step: {format_count(1 / period)} steps/s, {format_count(run.samples_per_second)} samples/s"
    yield "speed", Text.assemble((format_seconds(period), "bold"), speed)
    yield "plan's period", Text(_planned(simulation))
    yield "limit", Text(_limit(simulation))
    yield "idle", Text(", ".join(f"{lane} {format_share(share)}" for lane, share in run.idle))
    yield "staleness", Text(_staleness(simulation))
    yield "interrupted", Text(_interrupted(simulation))
    for label, is_drop in (("refused", False), ("dropped", True)):
        yield label, Text(_lost(simulation, is_drop=is_drop))


def _planned(simulation: Simulation) -> str:
    seconds, is_lower_bound = step_seconds(simulation.plan)
    if seconds is None:
        return "unknown"
    more = round(100 * (simulation.period / seconds - 1), 1)
    compared = f"{abs(more):g} % {'more' if more > 0 else 'less'}" if more else "as much"
    bound = ", a lower bound" if is_lower_bound else ""
    return f"{format_seconds(seconds)} a step{bound}; the simulated step takes {compared}"


def _limit(simulation: Simulation) -> str:
    """Return the limit, what it is the largest of, and how close the run comes to it."""
    alone = (("generation alone", simulation.generation_alone), ("training alone", simulation.training_alone))
    turns = (
        (f"generation and training in turns on the devices of {group}", seconds)
        for group, seconds in simulation.in_turns
    )
    rows = ", ".join(f"{what} {format_seconds(seconds)}" for what, seconds in (*alone, *turns))
    return (
        f"{format_seconds(simulation.limit)} a step at best, the largest of: {rows}. The simulated run "
        f"reaches {format_share(simulation.limit / simulation.period)} of that speed"
    )


def _staleness(simulation: Simulation) -> str:
    found = simulation.run.staleness()
    certificate = staleness_line(simulation.plan)
    if not found:
        return f"none: nothing is generated ({certificate})"
    mean = sum(lag * num for lag, num in found.items()) / sum(found.values())
    return f"{format_count(mean)} on average, {max(found)} at most; by the plan {certificate}"


def _interrupted(simulation: Simulation) -> str:
    times, tokens = simulation.run.interruptions, simulation.tokens_kept
    if not times:
        return "none"
    kept = format_count(round(tokens))
    return f"{pluralize(times, 'time')}; {kept} tokens were kept instead of generated again"


def _lost(simulation: Simulation, *, is_drop: bool) -> str:
    rows = [(reason, num) for reason, num in simulation.run.refused if (reason in DROPS) == is_drop]
    return ", ".join(f"{pluralize(num, 'sample')} {reason}" for reason, num in rows) or "none"


def render_simulation(simulation: Simulation) -> RenderableType:
    """Return the report of a simulated run, as wide as its console and at most `WIDEST` columns."""

    def parts(width: int) -> Iterator[RenderableType]:
        yield header(simulation)
        for section in (staleness_section(simulation, width), chart_section(simulation, width)):
            if not section.absent:
                yield from shown(section)

    return Report(parts)
