"""The parts of a plan before it is known which bytes go where: data rules, cuts, groups, nodes, the schedule.

They depend on which replicas share devices. The search makes them (`plan_structure`) for each way of dividing
the replicas into groups; `compile_plan` adds the rest for the one that is executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hflow.graph.ir import Graph, Level, Node
from hflow.graph.queries import (
    firing_levels,
    keeps_groups_whole,
    root_streams,
    saved_models,
    topological_order,
)
from hflow.planner.checks.settings import check_request, check_splits, check_streams, plan_warnings
from hflow.planner.make.placement import place_graph
from hflow.planner.make.schedule import Orders, group_orders, make_schedule
from hflow.planner.models.choices import attention_choices, determinism_warnings, layer_choices
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import SAVE_PREFIX, BatchCut, EdgeRule, Placement, Plan
from hflow.planner.plan.schedule import order_edges
from hflow.planner.plan.staleness import staleness_bound
from hflow.types import Unit


def edge_rules(
    graph: Graph, levels: Mapping[str, Level], placements: Iterable[Placement]
) -> tuple[EdgeRule, ...]:
    """Return one rule for every batch node, and for every model that runs as samples arrive."""
    at = {placement.node: placement for placement in placements}
    return tuple(
        _rule(node, at[node.name])
        for node in graph.nodes
        if levels[node.name] is Level.BATCH or node.spec.verb == "infer"
    )


def save_rule(placement: Placement, stream: str) -> EdgeRule:
    """Return the rule of a node that saves a model: it reads no fields."""
    return EdgeRule(placement.node, stream, (), placement.heads, by_group=False, policy="balanced")


def batch_cuts(graph: Graph) -> tuple[tuple[str, BatchCut], ...]:
    """Return the cut of each train node's batch."""
    return tuple((node.name, _cut(node)) for node in graph.nodes if node.spec.verb == "train")


def _cut(node: Node) -> BatchCut:
    minibatches, epochs = node.spec.option("minibatches", 1), node.spec.option("epochs", 1)
    return BatchCut(minibatches, epochs, by_group=keeps_groups_whole(node))


def _rule(node: Node, placement: Placement) -> EdgeRule:
    fields = {f"{read.stream}/{read.field}" for read in node.reads if read.producer != node.name}
    fields |= {f"{node.stream}/{name}" for name in _required_fields(node)}
    return EdgeRule(
        consumer=node.name,
        stream=node.stream,
        fields=tuple(sorted(fields)),
        heads=placement.heads,
        by_group=keeps_groups_whole(node),
        policy="balanced" if placement.replicas else "single",
    )


def _required_fields(node: Node) -> tuple[str, ...]:
    """Return the fields of its own stream that a node needs besides those that its body reads.

    A forward pass needs the tokens. Values per token are 0 where the loss mask is 0, also in per-sample and
    per-group bodies that fire by batch, and `Sequences` holds the mask.
    """
    if any(kind == "output" for _, kind in node.spec.provided) or node.spec.verb in ("infer", "train"):
        return ("input_ids", "loss_mask")
    is_packed = node.spec.verb == "compute" and node.spec.level is Level.BATCH
    reads_tokens = any(read.unit is Unit.TOKEN for read in node.reads)
    return ("loss_mask",) if is_packed or reads_tokens else ()


def plan_structure(
    graph: Graph, request: PlanRequest, *, checks_batch: bool = True
) -> tuple[Plan, PlanRequest]:
    """Return a plan without routing table, weight routes and forecast, and the request with its placement.

    `checks_batch` refuses a batch that is too small for its layouts.

    Raises:
        PlanError: if settings, layouts or groups do not fit together.
        NotYetError: if the graph trains on two streams.
    """
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
    if checks_batch:
        check_splits(batch_rules, dict(cuts), request.batch, trained.group)
    orders = _orders(graph, levels, by_node, saved)
    schedule = make_schedule(graph, request, levels, placements, replicas, orders, saved)
    group_sizes = {group.name: len(group.devices) for group in placed.groups}
    plan = Plan(
        recipe=graph.name,
        graph=graph,
        cluster=request.cluster,
        hardware=request.hardware,
        groups=placed.groups,
        replicas=replicas,
        placements=placements,
        order=order_edges(orders),
        routing=(),
        rules=rules,
        cuts=cuts,
        weights=(),
        schedule=schedule,
        shapes=tuple(sorted(request.shapes.items())),
        settings=tuple(sorted({**request.settings, "seed": request.seed}.items())),
        staleness_bound=staleness_bound(schedule),
        deterministic=request.deterministic,
        warnings=(
            *graph.warnings,
            *request.warnings,
            *plan_warnings(replicas, group_sizes, request),
            *determinism_warnings(replicas, request),
        ),
        engines=placed.engines,
        attention=attention_choices(replicas, request),
        layers=layer_choices(replicas, request),
    )
    return plan, request


def _orders(
    graph: Graph,
    levels: Mapping[str, Level],
    placements: Mapping[str, Placement],
    saved: tuple[str, ...],
) -> Orders:
    """Return the cyclic node order of each group; a model is saved right after its last writer."""
    batch_nodes = [name for name in topological_order(graph) if levels[name] is Level.BATCH]
    for model in saved:
        writers = [i for i, name in enumerate(batch_nodes) if _writes(graph, name, model)]
        batch_nodes.insert(max(writers) + 1, SAVE_PREFIX + model)
    return group_orders(batch_nodes, {name: placements[name].groups for name in batch_nodes})


def _writes(graph: Graph, name: str, model: str) -> bool:
    return not name.startswith(SAVE_PREFIX) and model in graph.node(name).spec.writes_weights
