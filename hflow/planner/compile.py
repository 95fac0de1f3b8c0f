"""`compile_plan`: place a graph on a cluster, with its forecast. A pure function; imports no torch or ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial

from hflow.base.devices import is_gpu
from hflow.graph.ir import EdgeKind, Graph
from hflow.graph.model import Model
from hflow.planner.checks.unrunnable import unrunnable_reasons
from hflow.planner.forecast.cost import generation_pace, node_times
from hflow.planner.forecast.figures import leaves_waiting_out, step_seconds
from hflow.planner.forecast.memory import (
    check_host_memory,
    check_memory,
    check_zero_stages,
    engine_caches,
    host_memory,
    host_memory_warnings,
    margin_warnings,
    memory_phases,
    unknown_models,
)
from hflow.planner.forecast.period import steady_period
from hflow.planner.forecast.traffic import estimate_traffic
from hflow.planner.make.structure import plan_structure
from hflow.planner.plan.forecast import Candidate, Forecast, NodeTime, Period
from hflow.planner.plan.request import PlanRequest, stream_workloads
from hflow.planner.plan.routing import routing_table
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.serialise import plan_digest
from hflow.planner.search import (
    Basis,
    PeriodFunction,
    chosen_layouts,
    decide_layouts,
    nearest_fit,
    throttles,
)
from hflow.planner.weights.weight_routes import weight_routes


def compile_plan(
    graph: Graph,
    request: PlanRequest,
    *,
    candidates: tuple[Candidate, ...] = (),
    backend: str = "",
    with_limits: bool = False,
    searched: PlanRequest | None = None,
    simulate: PeriodFunction | None = None,
) -> Plan:
    """Decide where every node runs, in which order, and by which rules its data moves.

    Args:
        candidates: placements that were compared, if the planner has chosen this one.
        backend: the training backend that was chosen, with the reason.
        with_limits: whether to find the settings that make a step longer than necessary (`Forecast.limits`).
        searched: the request before the planner chose this one; limits need it.
        simulate: a function that gives the seconds of a step where the period leaves out waiting. On
            CPUs this takes a moment only where the plan is shown or was compared with others.

    Raises:
        PlanError: if settings, layouts or groups do not fit together, or the estimated memory exceeds that of
            the devices. The message names a change that fits.
        NotYetError: if the graph trains on two streams.
    """
    asked = searched or request
    structure, request = plan_structure(graph, request)
    decided, reasons = decide_layouts(graph, request, structure)
    if decided is not request:
        structure, request = plan_structure(graph, decided)
    chosen = frozenset(dict(reasons)) if searched is None else chosen_layouts(graph, searched)
    plan = _with_caches(_with_rows(structure, request), request)
    check_zero_stages(plan, request, asked.free)
    plan = dataclasses.replace(plan, unrunnable=unrunnable_reasons(plan, request, chosen=chosen))
    estimates = build_forecast(plan, request)
    estimates = dataclasses.replace(estimates, layouts=reasons, candidates=candidates, backend=backend)
    if simulate is not None and (candidates or with_limits or is_gpu(plan.cluster.device)):
        estimates = _simulated(dataclasses.replace(plan, forecast=estimates), estimates, simulate)
    if with_limits:
        basis = Basis(graph, request, searched, simulate, plan.engines)
        limits = throttles(basis, estimates, is_placed=not candidates, can_run=not plan.unrunnable)
        estimates = dataclasses.replace(estimates, limits=limits)
    estimates = dataclasses.replace(estimates, candidates=tuple(_with_moves(plan, estimates)))
    nearest = partial(nearest_fit, graph, request, asked)
    check_memory(estimates.memory, plan.cluster, nearest)
    check_host_memory(estimates.host)
    tight = margin_warnings(estimates.memory, plan.cluster, partial(nearest, may_grow=False))
    plan = dataclasses.replace(
        plan, warnings=(*plan.warnings, *tight, *host_memory_warnings(estimates.host, request))
    )
    plan = dataclasses.replace(plan, forecast=estimates)
    return dataclasses.replace(plan, digest=plan_digest(plan))


def _simulated(plan: Plan, forecast: Forecast, simulate: PeriodFunction) -> Forecast:
    """Return a plan's forecast with the state machine's seconds, if its period leaves out waiting."""
    period, pace = forecast.period, forecast.pace
    if period is None or pace is None or not period.seconds or not leaves_waiting_out(plan):
        return forecast
    workload = dict(forecast.workload)[plan.schedule.streams[0].name]
    seconds = {row.node: row.seconds for row in forecast.times}
    step = simulate(plan.schedule, seconds, pace, workload)
    shares = dict(step.idle)
    idle = tuple((lane, shares.get(lane, share)) for lane, share in period.idle)
    return dataclasses.replace(
        forecast, period=dataclasses.replace(period, simulated=step.seconds, idle=idle)
    )


def _with_moves(plan: Plan, forecast: Forecast) -> Iterator[Candidate]:
    """Yield the candidates with the seconds in which the plan moves inputs, which a search leaves out."""
    seconds, _ = step_seconds(dataclasses.replace(plan, forecast=forecast))
    for row in forecast.candidates:
        added = 0.0 if seconds is None else seconds - forecast.candidates[0].seconds
        yield dataclasses.replace(row, seconds=row.seconds + added)


def _with_caches(plan: Plan, request: PlanRequest) -> Plan:
    """Return the plan with the caches of its engines."""
    caches = engine_caches(plan, request)
    engines = []
    for engine in plan.engines:
        size, batch = caches.get(engine.replica, (None, None))
        engines.append(dataclasses.replace(engine, cache_bytes=size, largest_batch=batch))
    return dataclasses.replace(plan, engines=tuple(engines))


def _with_rows(plan: Plan, request: PlanRequest) -> Plan:
    """Return the plan with its routing table and weight routes."""
    dp_heads = plan.placement(plan.schedule.streams[0].source).heads
    return dataclasses.replace(
        plan,
        routing=routing_table(plan.replicas, dp_heads, range(request.cluster.num_devices)),
        weights=weight_routes(plan.graph, plan.groups, plan.replicas, request),
    )


def build_forecast(plan: Plan, request: PlanRequest) -> Forecast:
    """Return all that can be estimated of a plan."""
    lengths = stream_workloads(plan, request)
    traffic = estimate_traffic(plan, request, dict(lengths)[plan.schedule.streams[0].name])
    times = node_times(plan, request, dict(lengths), traffic)
    missing = tuple(_missing(plan, request))
    return Forecast(
        workload=lengths,
        memory=memory_phases(plan, request),
        times=times,
        period=None if missing else _period(plan, times),
        traffic=traffic,
        missing=missing,
        pace=generation_pace(plan, request, dict(lengths), traffic),
        host=host_memory(plan, request),
    )


def _period(plan: Plan, times: Iterable[NodeTime]) -> Period | None:
    data = [edge for edge in plan.graph.edges if edge.kind is EdgeKind.DATA and edge.lag == 0]
    fields = {(edge.src, edge.dst): ", ".join(edge.fields) for edge in data if edge.fields}
    return steady_period(plan.schedule, {row.node: row.seconds for row in times}, fields)


def _missing(plan: Plan, request: PlanRequest) -> Iterator[str]:
    if not plan.graph.learns:
        yield f"{plan.recipe} learns nothing, so it has no steps and no period"
    for model in unknown_models(plan):
        cause = "the planner does not know its sizes"
        if model not in request.families:
            source = plan.graph.model(model)
            while (path := _path(source, request)) is None and source.init_from is not None:
                source = source.init_from
            cause = (
                f"it has no weights yet (set models.{model}.path to a checkpoint directory, or "
                f"model@models.{model}=tiny-qwen2)"
                if path is None
                else f"there is no checkpoint in {path} (models.{source.name}.path)"
            )
        yield (
            f"{model}: {cause}, so its memory, weight routes and seconds, and the period of the plan, are "
            "not estimated"
        )


def _path(model: Model, request: PlanRequest) -> str | None:
    return request.models[model.name].path if model.name in request.models else None
