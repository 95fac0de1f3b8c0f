"""Some steps of the stride drawn as they were simulated: batch nodes, and engines that have samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hflow.plan.forecast import Period, Slot
from hflow.report.plan_text.gantt import gantt
from hflow.report.plan_text.section import Section

if TYPE_CHECKING:
    from hflow.runtime.simulate_plan import Simulation
    from hflow.workers.base import Span

NUM_STEPS = 4
"""Steps drawn."""
NOTE = "From the end of one step on, in the middle of the run. Idle shares are those of the whole stride."


def chart_section(simulation: Simulation, width: int) -> Section:
    """A lane for each device group and engine; an engine's bars say when it has samples to draw."""
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
    return Section("Some steps", NOTE, tuple(gantt(window, width)))


def _slots(simulation: Simulation, start: float, end: float) -> Iterator[Slot]:
    """What runs between two moments, cut to them."""
    replicas = simulation.plan.schedule.streams[0].replicas
    batch_nodes = (span for span in simulation.run.timeline.spans if span.lane not in replicas)
    for span in sorted((*batch_nodes, *simulation.run.generating), key=_by_start):
        if span.start < end and span.end > start:
            first = max(span.start, start)
            yield Slot(_name(simulation, span), span.lane, first - start, min(span.end, end) - first)


def _name(simulation: Simulation, span: Span) -> str:
    stream = simulation.plan.schedule.streams[0]
    return stream.source if span.name in stream.replicas else span.name


def _by_start(span: Span) -> float:
    return span.start
