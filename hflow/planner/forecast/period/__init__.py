"""The steady state of a schedule: the seconds of a step, the cycle that determines them, and idle devices.

This is pure arithmetic on a `Schedule` and the seconds of its nodes. If all durations are fixed, tests hold
these statements:

- The period of batch nodes is exactly the one that `RunState` reaches on a virtual clock.
- So is the period of synchronous generation with one batch per turn. It is an upper bound if all of this
holds:
  engines share devices with batch nodes, a further batch may be generated before new weights arrive
  (`sync_every` above 1, or a source whose weights do not change), and samples pass through sample or group
  nodes. While those nodes run, the engines already generate samples of the next batch, for which the period
  waits until their next turn. If those nodes take no time, the period is exact again.
- The period of asynchronous generation is an estimate; see `step_graph`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hflow.planner.forecast.period.cycle_ratio import SteadyState, steady_state
from hflow.planner.forecast.period.step_graph import (
    Fields,
    SteadyEvents,
    TimedGraph,
    add_generation,
    link_batch_nodes,
    link_generation,
)
from hflow.planner.plan.forecast import CycleStep, Period, Slot
from hflow.planner.plan.rows import Schedule


def steady_period(
    schedule: Schedule, seconds: Mapping[str, float], fields: Fields | None = None
) -> Period | None:
    """Return the period of a schedule, its critical cycle, and when everything runs.

    Nodes that run every n steps are unrolled if the schedule repeats after at most `MAX_UNROLLED_STEPS`
    steps. Rarer nodes count in every step with their mean. The slots cover the unrolled steps.

    Args:
        seconds: name -> seconds of one execution of a node, of one whole batch of a source, of a replica that
            loads new weights, and of `publish.REPLICA`. Missing names take no time.
        fields: (producer, consumer) -> the fields between them, which name edges of the cycle.

    Returns:
        None if nothing that repeats takes time.
    """
    events = SteadyEvents(schedule)
    graph = timed_graph(events, seconds, fields or {})
    state = steady_state(len(graph.vertices), graph.arcs)
    if state is None or state.ratio <= 0:
        return None
    bars = slots(graph, state)
    return Period(
        seconds=state.ratio,
        cycle=cycle_rows(schedule, graph, state),
        slots=bars,
        idle=idle_shares(events.lanes(), bars, state.ratio * graph.num_unrolled),
        num_steps=graph.num_unrolled,
    )


def timed_graph(events: SteadyEvents, seconds: Mapping[str, float], fields: Fields) -> TimedGraph:
    """Return the graph of the steady state: everything that runs, and everything that it waits for."""
    graph = TimedGraph(events.num_unrolled)
    for step in range(graph.num_unrolled):
        add_generation(graph, events, seconds, step)
        for node in events.nodes:
            fires = events.fires(node, step)
            spent = seconds.get(node.name, 0.0) * events.share(node) if fires else 0.0
            graph.add(node.name, step, spent, node.groups or (node.name,), is_shown=fires)
    link_batch_nodes(graph, events, fields)
    link_generation(graph, events, fields)
    return graph


REASONS_WITH_LAG = ("next ", "turn of ", "one batch ahead")
"""Beginnings of reasons that already say that an edge leads to a later step."""


NUM_DIGITS = 9
"""Digits of a fraction that are not rounding errors."""


def cycle_rows(schedule: Schedule, graph: TimedGraph, state: SteadyState) -> tuple[CycleStep, ...]:
    """Return the critical cycle from the node that comes first in the schedule. Equal laps appear once."""
    names = [schedule.streams[0].source, *(node.name for node in schedule.nodes)]
    rank = {name: place for place, name in enumerate(names)}
    tails = [graph.vertices[arc.src] for arc in state.cycle]
    shown = [i for i, tail in enumerate(tails) if tail.is_shown]
    first = min(shown, key=lambda i: (rank.get(tails[i].name, len(rank)), tails[i].step))
    rows: list[CycleStep] = []
    for i in (*range(first, len(tails)), *range(first)):
        tail, arc = tails[i], state.cycle[i]
        if tail.is_shown:
            rows.append(CycleStep(tail.name, tail.seconds, arc.why, arc.lag))
        else:
            rows[-1] = _merge_hidden(rows[-1], arc.why, arc.lag)
    return tuple(_name_lag(row) for row in _first_lap(_shift_negative_lags(rows)))


def slots(graph: TimedGraph, state: SteadyState) -> tuple[Slot, ...]:
    """Return the rows of what takes time, by their start. The first starts at 0."""
    bars = [
        Slot(vertex.name, lane, start + vertex.step * state.ratio, vertex.seconds, vertex.step)
        for vertex, start in zip(graph.vertices, state.starts, strict=True)
        if vertex.is_shown and vertex.seconds > 0
        for lane in vertex.lanes
    ]
    first = min(bar.start for bar in bars)
    return tuple(sorted((replace(bar, start=bar.start - first) for bar in bars), key=lambda bar: bar.start))


def idle_shares(lanes: Sequence[str], bars: Sequence[Slot], seconds: float) -> tuple[tuple[str, float], ...]:
    """Return the fraction of a period in which each lane has no slot. Slots wrap around its end."""
    covered = ((lane, _covered(_wrapped(lane, bars, seconds))) for lane in lanes)
    return tuple((lane, round(max(0.0, 1 - busy / seconds), NUM_DIGITS)) for lane, busy in covered)


def _merge_hidden(row: CycleStep, why: str, lag: int) -> CycleStep:
    """Extend a row's edge through a vertex that is not shown."""
    keeps = not why or (row.lag and not lag)
    return replace(row, why=row.why if keeps else why, lag=row.lag + lag)


def _shift_negative_lags(rows: list[CycleStep]) -> list[CycleStep]:
    """Make all lags at least 0 by moving a negative lag to the next edge."""
    for i in (*range(len(rows)), *range(len(rows))):
        if rows[i].lag < 0:
            after = (i + 1) % len(rows)
            rows[after] = replace(rows[after], lag=rows[after].lag + rows[i].lag)
            rows[i] = replace(rows[i], lag=0)
    return rows


def _first_lap(rows: list[CycleStep]) -> list[CycleStep]:
    sizes = (size for size in range(1, len(rows) + 1) if len(rows) % size == 0)
    return next(rows[:size] for size in sizes if rows[:size] * (len(rows) // size) == rows)


def _name_lag(row: CycleStep) -> CycleStep:
    if row.lag == 0 or row.why.startswith(REASONS_WITH_LAG):
        return row
    return replace(row, why=f"{row.why}, {row.lag} step{'s' if row.lag > 1 else ''} later")


def _wrapped(lane: str, bars: Sequence[Slot], seconds: float) -> Iterator[tuple[float, float]]:
    """Yield (start, end) of a lane's slots within one period."""
    for bar in bars:
        if bar.lane == lane:
            start = bar.start % seconds
            end = start + bar.seconds
            yield start, min(end, seconds)
            if end > seconds:
                yield 0.0, end - seconds


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
