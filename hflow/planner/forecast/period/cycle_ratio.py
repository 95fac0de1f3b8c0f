"""The slowest cycle of a timed event graph, and start times at its pace.

A vertex runs once per step. An arc with lag n means that its head runs at step k after its tail of step k -
n. If every vertex starts step k at `start + k * ratio`, then each cycle needs

    ratio >= seconds on the cycle / steps that it crosses

and the steady state reaches the largest of these bounds. With arc weights `seconds - ratio * lag` no cycle is
positive then, and longest paths are start times.

The algorithm starts at a ratio that is too small and computes longest paths until they contain a positive
cycle. It raises the ratio to that of the cycle, and repeats this until there is no positive cycle. Each cycle
is strictly slower than the one before, and there are finitely many, so the last one is the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ROUNDING = 1e-13
"""Improvements below this fraction of the sum of all seconds are rounding errors."""


@dataclass(frozen=True)
class Arc:
    """The head waits for the tail."""

    src: int
    dst: int
    seconds: float
    """Duration of the tail, at least 0."""
    lag: int
    """Steps between tail and head. It may be negative if every cycle crosses at least one step."""
    why: str = ""
    """The reason for waiting, in words."""


@dataclass(frozen=True)
class SteadyState:
    """The pace of a timed event graph."""

    ratio: float
    """Seconds per step."""
    cycle: tuple[Arc, ...]
    """The slowest cycle. The head of each arc is the tail of the next one."""
    starts: tuple[float, ...]
    """The earliest start of each vertex; at step k it is `k * ratio` later."""


def steady_state(num_vertices: int, arcs: Sequence[Arc]) -> SteadyState | None:
    """Return the maximum of (seconds / lag) over all cycles, or None if there is no cycle.

    Vertices are numbered from 0. The search is fastest if arcs are in the order in which their tails run.

    Raises:
        ValueError: when a cycle takes time but crosses no step, so that it waits for itself.
    """
    ratio, cycle = -1.0, []  # a cycle's ratio is at least 0
    slack = ROUNDING * math.fsum(arc.seconds for arc in arcs)
    while True:
        starts, positive = _longest_paths(num_vertices, arcs, ratio, slack)
        if not positive or cycle_ratio(positive) <= ratio:
            break
        ratio, cycle = cycle_ratio(positive), positive
    return SteadyState(ratio, tuple(cycle), tuple(starts)) if cycle else None


def find_slower_cycle(num_vertices: int, arcs: Sequence[Arc], ratio: float) -> list[Arc]:
    """Return a cycle with a larger ratio than this one, not always the largest; empty if there is none."""
    slack = ROUNDING * math.fsum(arc.seconds for arc in arcs)
    _, positive = _longest_paths(num_vertices, arcs, ratio, slack)
    return positive if positive and cycle_ratio(positive) > ratio else []


def cycle_ratio(cycle: Sequence[Arc]) -> float:
    """Return the seconds on a cycle divided by the steps that it crosses."""
    lag = sum(arc.lag for arc in cycle)
    if lag <= 0:
        raise ValueError(f"a cycle of {len(cycle)} arcs waits for itself: it crosses {lag} steps")
    return math.fsum(arc.seconds for arc in cycle) / lag


def _longest_paths(
    num_vertices: int, arcs: Sequence[Arc], ratio: float, slack: float
) -> tuple[list[float], list[Arc]]:
    """Return longest paths to each vertex (Bellman-Ford), or a positive cycle as soon as they contain one."""
    lengths = [0.0] * num_vertices
    last: list[Arc | None] = [None] * num_vertices
    weights = [(arc.seconds - ratio * arc.lag, arc) for arc in arcs]
    while True:
        changed = False
        for weight, arc in weights:
            length = lengths[arc.src] + weight
            if length > lengths[arc.dst] + slack:
                lengths[arc.dst], last[arc.dst] = length, arc
                changed = True
        cycle = _slowest_cycle(last) if changed else []
        if cycle or not changed:
            return lengths, cycle


def _slowest_cycle(last: Sequence[Arc | None]) -> list[Arc]:
    """Return the slowest cycle among the last arcs of paths. Each vertex has at most one such arc."""
    slowest: list[Arc] = []
    seen: dict[int, int] = {}
    for start in range(len(last)):
        vertex, path = start, []
        while vertex not in seen and (arc := last[vertex]) is not None:
            seen[vertex] = start
            path.append(arc)
            vertex = arc.src
        if seen.get(vertex) == start:
            first = next(i for i, arc in enumerate(path) if arc.dst == vertex)
            cycle = path[first:][::-1]
            if not slowest or cycle_ratio(cycle) > cycle_ratio(slowest):
                slowest = cycle
    return slowest
