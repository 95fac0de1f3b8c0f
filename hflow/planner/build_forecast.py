"""Build the forecast of a plan: lengths, memory, traffic, seconds and the period."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hflow.graph.ir import EdgeKind
from hflow.graph.model import Model
from hflow.planner.cost import generation_pace, node_times
from hflow.planner.data.traffic_estimate import estimate_traffic
from hflow.planner.forecast import Forecast, NodeTime, Period
from hflow.planner.ir import Plan
from hflow.planner.memory import host_memory, memory_phases, unknown_models
from hflow.planner.period import steady_period
from hflow.planner.request import PlanRequest
from hflow.planner.stream_workloads import stream_workloads


def build_forecast(plan: Plan, request: PlanRequest) -> Forecast | None:
    """Return all that can be estimated of a plan, or None without figures of the hardware."""
    if request.hardware is None:
        return None
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
