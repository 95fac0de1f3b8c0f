"""`compile_plan`: place a graph on a cluster. A pure function that needs neither torch nor ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from hflow.config.schema import ModelConfig
from hflow.graph.ir import Graph, Level
from hflow.planner.build_forecast import build_forecast
from hflow.planner.data.data_rules import batch_cuts, edge_rules, save_rule
from hflow.planner.graph_queries import root_streams, saved_models
from hflow.planner.ir import SAVE_PREFIX, Placement, Plan
from hflow.planner.memory import ChosenLayout, check_memory, default_layouts, engine_caches
from hflow.planner.node_order import firing_levels, group_orders, order_edges, topological_order
from hflow.planner.placement import place_graph
from hflow.planner.request import PlanRequest
from hflow.planner.routing import routing_table
from hflow.planner.schedule import Orders, make_schedule
from hflow.planner.serialise import plan_digest
from hflow.planner.staleness import staleness_bound
from hflow.planner.unrunnable import unrunnable_reasons
from hflow.planner.validate import check_request, check_splits, check_streams, plan_warnings
from hflow.planner.weights.weight_routes import weight_routes


def compile_plan(graph: Graph, request: PlanRequest) -> Plan:
    """Decide where every node runs, in which order, and by which rules its data moves.

    Args:
        graph: a checked graph.
        request: the cluster, where each model runs, and the settings of the run.

    Raises:
        PlanError: if settings, layouts or groups do not fit together, or the estimated memory exceeds that of
            the devices. The message names a change that fits.
        NotYetError: if the graph trains on two streams.
    """
    plan, request = _compile_rows(graph, request)
    chosen = default_layouts(plan, request)
    if any(plan.replica(choice.replica).layout != choice.layout for choice in chosen):
        request = _with_chosen(request, chosen)
        plan, request = _compile_rows(graph, request)
    plan = _with_caches(plan, request)
    estimates = build_forecast(plan, request)
    if estimates is not None:
        reasons = tuple((choice.replica, choice.why) for choice in chosen)
        estimates = dataclasses.replace(estimates, layouts=reasons)
        check_memory(plan, request, estimates.memory)
    plan = dataclasses.replace(plan, hardware=request.hardware, forecast=estimates)
    return dataclasses.replace(plan, digest=plan_digest(plan))


def _with_chosen(request: PlanRequest, chosen: Iterable[ChosenLayout]) -> PlanRequest:
    """Return the request with the layouts that the planner chose."""
    models = dict(request.models)
    for choice in chosen:
        config, layout = models.get(choice.model, ModelConfig()), str(choice.layout)
        if choice.replica.endswith("@gen"):
            config = dataclasses.replace(config, gen=dataclasses.replace(config.gen, layout=layout))
        else:
            config = dataclasses.replace(config, layout=layout)
        models[choice.model] = config
    return dataclasses.replace(request, models=models)


def _with_caches(plan: Plan, request: PlanRequest) -> Plan:
    """Return the plan with the caches of its engines, as far as its devices have figures."""
    caches = {} if request.hardware is None else engine_caches(plan, request)
    engines = []
    for engine in plan.engines:
        size, batch = caches.get(engine.replica, (None, None))
        engines.append(dataclasses.replace(engine, cache_bytes=size, largest_batch=batch))
    return dataclasses.replace(plan, engines=tuple(engines))


def _compile_rows(graph: Graph, request: PlanRequest) -> tuple[Plan, PlanRequest]:
    """Return the plan without its forecast, and the request with its placement resolved."""
    check_request(graph, request)
    check_streams(graph)
    levels = firing_levels(graph)
    placed = place_graph(graph, request, levels)
    request, replicas, placements = placed.request, placed.replicas, placed.placements
    saved = saved_models(graph)
    trained = root_streams(graph)[0]
    by_node = {placement.node: placement for placement in placements}
    saves = [save_rule(by_node[SAVE_PREFIX + model], trained.name) for model in saved]
    rules = (*edge_rules(graph, levels, placements), *saves)
    cuts = batch_cuts(graph)
    batch_rules = [
        rule
        for rule in rules
        if graph.stream(rule.stream).trained and levels.get(rule.consumer, Level.BATCH) is Level.BATCH
    ]
    check_splits(batch_rules, dict(cuts), request.batch, trained.group)
    orders = _orders(graph, levels, by_node, saved)
    schedule = make_schedule(graph, request, levels, placements, replicas, orders, saved)
    group_sizes = {group.name: len(group.devices) for group in placed.groups}
    plan = Plan(
        recipe=graph.name,
        graph=graph,
        cluster=request.cluster,
        groups=placed.groups,
        replicas=replicas,
        placements=placements,
        order=order_edges(orders),
        routing=routing_table(replicas, by_node[trained.source].heads, range(request.cluster.num_devices)),
        rules=rules,
        cuts=cuts,
        weights=weight_routes(graph, replicas, request),
        schedule=schedule,
        shapes=tuple(sorted(request.shapes.items())),
        settings=tuple(sorted({**request.settings, "seed": request.seed}.items())),
        staleness_bound=staleness_bound(schedule),
        warnings=(*graph.warnings, *request.warnings, *plan_warnings(replicas, group_sizes)),
        engines=placed.engines,
    )
    return dataclasses.replace(plan, unrunnable=unrunnable_reasons(plan, request)), request


def _orders(
    graph: Graph, levels: dict[str, Level], placements: dict[str, Placement], saved: tuple[str, ...]
) -> Orders:
    """Return the cyclic node order of each group; a model is saved right after its last writer."""
    batch_nodes = [name for name in topological_order(graph) if levels[name] is Level.BATCH]
    for model in saved:
        writers = [i for i, name in enumerate(batch_nodes) if _writes(graph, name, model)]
        batch_nodes.insert(max(writers) + 1, SAVE_PREFIX + model)
    return group_orders(batch_nodes, {name: placements[name].group for name in batch_nodes})


def _writes(graph: Graph, name: str, model: str) -> bool:
    return not name.startswith(SAVE_PREFIX) and model in graph.node(name).spec.writes_weights
