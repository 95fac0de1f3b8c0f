"""`throttles`: settings that make a step longer than it needs to be, and what idle devices could be used for.

Each line is tried: the plan is costed again with one setting changed and everything else as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hflow.errors import PlanError
from hflow.graph.ir import Graph
from hflow.planner.forecast import Forecast
from hflow.planner.placement.replicas import replica_roles
from hflow.planner.request import PlanRequest
from hflow.planner.search.evaluate import Evaluator
from hflow.planner.search.explore import explore
from hflow.planner.search.options import MAX_RUNNING
from hflow.planner.search.problem import SearchProblem
from hflow.planner.search.result import with_settings
from hflow.planner.staleness import admission_limit

MIN_GAIN = 0.05
"""Share of a step below which a limit is not named."""
MUCH_IDLE = 0.3
"""Idle share of a step from which on devices count as idle."""


def throttles(graph: Graph, request: PlanRequest, forecast: Forecast) -> tuple[str, ...]:
    """Return settings that hold a plan back, each with the gain of another value.

    Args:
        graph: a checked graph.
        request: what the plan was compiled from, with its groups and layouts.
        forecast: of the plan.
    """
    if request.hardware is None or forecast.missing or forecast.period is None:
        return ()
    before = _period(graph, request)
    if not before:
        return ()
    lines = []
    for key, old, value, why in _changes(graph, request, forecast):
        after = _period(graph, with_settings(request, {key: value}))
        if after is not None and after < before * (1 - MIN_GAIN):
            gain = f"{1 - after / before:.0%}".replace("%", " %")
            lines.append(f"{key}={old} {why}. With {key}={value} a step takes {gain} less.")
    return tuple(lines)


def _changes(
    graph: Graph, request: PlanRequest, forecast: Forecast
) -> Iterator[tuple[str, object, object, str]]:
    """Yield key, value, other value, and what the key does to the plan."""
    schedule = request.schedule
    group = max((stream.group for stream in graph.streams if stream.trained), default=1)
    useful = group * admission_limit(0, request.batch, schedule.max_staleness, schedule.sync_every)
    if useful > schedule.max_concurrent:
        key = "schedule.max_concurrent"
        yield key, schedule.max_concurrent, useful, "limits how many samples are generated at once"
    for model, role in replica_roles(graph):
        running = request.model(model).gen.max_running
        larger = [number for number in MAX_RUNNING if number > running]
        if role == "gen" and larger:
            key = f"models.{model}.gen.max_running"
            yield key, running, min(larger), "limits how many sequences an engine decodes at once"
    idle = (
        [(lane, share) for lane, share in forecast.period.idle if share > MUCH_IDLE]
        if forecast.period
        else []
    )
    if idle and not schedule.max_staleness:
        names = " and ".join(f"{lane} ({share:.0%} of a step)".replace("%", " %") for lane, share in idle)
        yield "schedule.max_staleness", 0, 1, f"leaves {names} idle"


def _period(graph: Graph, request: PlanRequest) -> float | None:
    """Return the seconds of a step of a request in which nothing is free, or None if it does not fit."""
    assert request.hardware is not None
    fixed = replace(request, free=frozenset())
    try:
        evaluator = Evaluator(SearchProblem(graph, fixed, request.hardware, margin=0.0))
        ranked = explore(evaluator, budget=1).ranked()
    except PlanError:
        return None
    return ranked[0].period if ranked else None
