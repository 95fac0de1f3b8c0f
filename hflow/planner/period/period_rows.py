"""A steady state as rows that people read: the cycle in words, bars in time, idle devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hflow.planner.forecast import CycleStep, Slot
from hflow.planner.ir import Schedule
from hflow.planner.period.cycle_ratio import SteadyState
from hflow.planner.period.timed_graph import TimedGraph

ALREADY_TOLD = ("next ", "turn of ", "one batch ahead")
"""Reasons that say themselves that they lead to a later step."""


NUM_DIGITS = 9
"""Digits of a share: below them is what floating-point sums leave."""


def cycle_rows(schedule: Schedule, graph: TimedGraph, state: SteadyState) -> tuple[CycleStep, ...]:
    """The critical cycle from the node that the schedule names first; laps that are alike stand once."""
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
            rows[-1] = _lead_on(rows[-1], arc.why, arc.lag)
    return tuple(_tell_lag(row) for row in _one_lap(_carry(rows)))


def slots(graph: TimedGraph, state: SteadyState) -> tuple[Slot, ...]:
    """What takes time, by its start; the first starts at 0."""
    bars = [
        Slot(vertex.name, lane, start + vertex.step * state.ratio, vertex.seconds, vertex.step)
        for vertex, start in zip(graph.vertices, state.starts, strict=True)
        if vertex.is_shown and vertex.seconds > 0
        for lane in vertex.lanes
    ]
    first = min(bar.start for bar in bars)
    return tuple(sorted((replace(bar, start=bar.start - first) for bar in bars), key=lambda bar: bar.start))


def idle_shares(lanes: Sequence[str], bars: Sequence[Slot], seconds: float) -> tuple[tuple[str, float], ...]:
    """Lane -> share of a round of `seconds` in which no bar lies on it; bars go around."""
    covered = ((lane, _covered(_folded(lane, bars, seconds))) for lane in lanes)
    return tuple((lane, round(max(0.0, 1 - busy / seconds), NUM_DIGITS)) for lane, busy in covered)


def _lead_on(row: CycleStep, why: str, lag: int) -> CycleStep:
    """A row whose edge leads on through a vertex that is not shown."""
    keeps = not why or (row.lag and not lag)
    return replace(row, why=row.why if keeps else why, lag=row.lag + lag)


def _carry(rows: list[CycleStep]) -> list[CycleStep]:
    """Count a vertex's step so that no edge leads back: what one edge lacks, the next one has too many."""
    for i in (*range(len(rows)), *range(len(rows))):
        if rows[i].lag < 0:
            after = (i + 1) % len(rows)
            rows[after] = replace(rows[after], lag=rows[after].lag + rows[i].lag)
            rows[i] = replace(rows[i], lag=0)
    return rows


def _one_lap(rows: list[CycleStep]) -> list[CycleStep]:
    sizes = (size for size in range(1, len(rows) + 1) if len(rows) % size == 0)
    return next(rows[:size] for size in sizes if rows[:size] * (len(rows) // size) == rows)


def _tell_lag(row: CycleStep) -> CycleStep:
    if row.lag == 0 or row.why.startswith(ALREADY_TOLD):
        return row
    return replace(row, why=f"{row.why}, {row.lag} step{'s' if row.lag > 1 else ''} later")


def _folded(lane: str, bars: Sequence[Slot], seconds: float) -> Iterator[tuple[float, float]]:
    """(start, end) of a lane's bars within one round."""
    for bar in bars:
        if bar.lane == lane:
            start = bar.start % seconds
            end = start + bar.seconds
            yield start, min(end, seconds)
            if end > seconds:
                yield 0.0, end - seconds


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
