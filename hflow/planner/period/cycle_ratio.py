"""The slowest cycle of a timed event graph, and start times that keep its pace.

A vertex fires once a step. An arc with lag n says that its head fires at step k when its tail of step
k - n is done. If the head's start at step k is `start + k * ratio` for every vertex, each cycle needs

    ratio >= seconds on the cycle / steps that it crosses

and the largest of these bounds is reached: the steady state's seconds a step. With weights
`seconds - ratio * lag` no cycle is positive then, and longest paths are start times.

So: from a ratio that is too small, longest paths are sought until they run into a positive cycle; the
ratio is raised to that cycle's; and so on until there is none. Each round's cycle is strictly slower
than the last one, and there are finitely many, so this ends with the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ROUNDING = 1e-13
"""What counts as no gain, as a share of all seconds together."""


@dataclass(frozen=True)
class Arc:
    """The head waits for the tail."""

    src: int
    dst: int
    seconds: float
    """How long the tail takes; not negative."""
    lag: int
    """Steps between them. Negative ones are fine as long as every cycle crosses a step or more."""
    why: str = ""
    """What the arc stands for."""


@dataclass(frozen=True)
class SteadyState:
    """The pace of a timed event graph."""

    ratio: float
    """Seconds a step."""
    cycle: tuple[Arc, ...]
    """A cycle that needs them, each arc's head the next one's tail."""
    starts: tuple[float, ...]
    """Vertex -> its first start, the earliest that there are; at step k it is `k * ratio` later."""


def steady_state(num_vertices: int, arcs: Sequence[Arc]) -> SteadyState | None:
    """The maximum over all cycles of (seconds / lag); None where there is no cycle.

    Args:
        num_vertices: vertices are numbered from 0.
        arcs: fastest when they are listed in the order in which their tails fire.

    Raises:
        ValueError: when a cycle takes time and crosses no step, so that it waits for itself.
    """
    ratio, cycle = -1.0, []  # a cycle's ratio is 0 at least
    slack = ROUNDING * math.fsum(arc.seconds for arc in arcs)
    while True:
        starts, found = _longest_paths(num_vertices, arcs, ratio, slack)
        if not found or cycle_ratio(found) <= ratio:
            break
        ratio, cycle = cycle_ratio(found), found
    return SteadyState(ratio, tuple(cycle), tuple(starts)) if cycle else None


def cycle_ratio(cycle: Sequence[Arc]) -> float:
    """Seconds on a cycle over the steps that it crosses."""
    lag = sum(arc.lag for arc in cycle)
    if lag <= 0:
        raise ValueError(f"a cycle of {len(cycle)} arcs waits for itself: it crosses {lag} steps")
    return math.fsum(arc.seconds for arc in cycle) / lag


def _longest_paths(
    num_vertices: int, arcs: Sequence[Arc], ratio: float, slack: float
) -> tuple[list[float], list[Arc]]:
    """Longest paths to each vertex by Bellman-Ford, or a positive cycle as soon as they contain one."""
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
    """The slowest cycle among the last arcs of paths, of which each vertex has one at most."""
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
