"""`throttles`: settings that make a step longer than it needs to be, and what would use idle devices.

Each remedy is tried: the plan is costed again with one change and everything else as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hflow.errors import PlanError
from hflow.graph.ir import Graph
from hflow.planner.forecast import Forecast, Limit, Remedy
from hflow.planner.placement.replicas import replica_roles
from hflow.planner.request import PlanRequest
from hflow.planner.search.evaluate import Evaluator
from hflow.planner.search.explore import explore
from hflow.planner.search.options import MAX_RUNNING
from hflow.planner.search.problem import PLACEMENT, SearchProblem
from hflow.planner.search.result import placement_of, with_settings, without_places
from hflow.planner.staleness import admission_limit

MIN_GAIN = 0.05
"""Share of a step below which a limit is not named."""
MUCH_IDLE = 0.3
"""Idle share of a step from which on devices count as idle."""
STALENESS = (1, 2, 4, 8)
"""Values of `max_staleness` to try for idle devices."""
NEARLY = 0.02
"""Share of a step by which a smaller staleness may be slower than the best one."""
PLACEMENT_BUDGET = 2000
"""Candidates when another placement is tried for idle devices."""


def throttles(
    graph: Graph, request: PlanRequest, forecast: Forecast, *, is_placed: bool = True
) -> tuple[Limit, ...]:
    """Return what holds a plan back: settings, then devices that are idle for much of a step.

    Args:
        graph: a checked graph.
        request: what the plan was compiled from, with its groups and layouts.
        forecast: of the plan.
        is_placed: whether the user has placed the replicas, so that another placement may be better.
    """
    if request.hardware is None or forecast.missing or forecast.period is None:
        return ()
    before = _period(graph, request)
    if not before:
        return ()
    limits = []
    for what, settings in _changes(graph, request):
        after = _period(graph, with_settings(request, settings))
        limits += [Limit(what, (remedy,)) for remedy in _remedies([(settings, after)], before)]
    idle = [(lane, share) for lane, share in forecast.period.idle if share > MUCH_IDLE]
    if idle:
        shares = ", ".join(f"{lane} is idle for {share:.0%}".replace("%", " %") for lane, share in idle)
        tried = [*_staler(graph, request, before), *(_elsewhere(graph, request) if is_placed else ())]
        lanes = tuple(lane for lane, _ in idle)
        limits.append(Limit(f"{shares} of a step", tuple(_remedies(tried, before)), lanes))
    return tuple(limits)


Tried = tuple[Mapping[str, Any], float | None]
"""Settings, and the seconds of a step with them; None: they do not fit."""


def _remedies(tried: Iterable[Tried], before: float) -> Iterator[Remedy]:
    """Yield the settings that shorten a step of `before` seconds noticeably."""
    for settings, after in tried:
        if after is not None and after < before * (1 - MIN_GAIN):
            yield Remedy(tuple(settings.items()), 1 - after / before)


def _changes(graph: Graph, request: PlanRequest) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what a setting does to the plan, and another value."""
    key, value = "schedule.max_concurrent", request.schedule.max_concurrent
    useful = _useful(graph, request, request.schedule.max_staleness)
    if useful > value:
        yield f"{key}={value} limits how many samples are generated at once", {key: useful}
    for model, role in replica_roles(graph):
        key, value = f"models.{model}.gen.max_running", request.model(model).gen.max_running
        larger = [number for number in MAX_RUNNING if number > value]
        if role == "gen" and larger:
            what = f"{key}={value} limits how many sequences an engine decodes at once"
            yield what, {key: min(larger)}


def _useful(graph: Graph, request: PlanRequest, max_staleness: float) -> int:
    """Return how many samples can be in flight at most."""
    group = max((stream.group for stream in graph.streams if stream.trained), default=1)
    return group * admission_limit(0, request.batch, max_staleness, request.schedule.sync_every)


def _staler(graph: Graph, request: PlanRequest, before: float) -> Iterator[Tried]:
    """Yield the smallest larger staleness with which devices are used most."""
    found = []
    for value in STALENESS:
        if value <= request.schedule.max_staleness:
            continue
        settings: dict[str, Any] = {"schedule.max_staleness": value}
        if (useful := _useful(graph, request, value)) > request.schedule.max_concurrent:
            settings["schedule.max_concurrent"] = useful
        after = _period(graph, with_settings(request, settings))
        if after is not None:
            found.append((settings, after))
    best = min((after for _, after in found), default=before)
    yield from [(settings, after) for settings, after in found if after <= best + NEARLY * before][:1]


def _elsewhere(graph: Graph, request: PlanRequest) -> Iterator[Tried]:
    """Yield the best placement with the same settings."""
    assert request.hardware is not None
    free = replace(without_places(request), placement=None, free=frozenset({PLACEMENT}))
    ranked = explore(Evaluator(SearchProblem(graph, free, request.hardware)), PLACEMENT_BUDGET).ranked()
    yield from [({PLACEMENT: placement_of(choice)}, choice.period) for choice in ranked[:1]]


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
