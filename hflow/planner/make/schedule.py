"""`make_schedule`: build the part of the plan that the state machine reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hflow.graph.ir import EdgeKind, Graph, Level, Node, Stream
from hflow.graph.queries import returns_keep, root_stream, root_streams, same_step, written_models
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import (
    SAVE_PREFIX,
    Placement,
    Replica,
    Schedule,
    ScheduledNode,
    ScheduledStream,
    batch_replica,
)

Orders = tuple[tuple[str, tuple[str, ...]], ...]


def make_schedule(
    graph: Graph,
    request: PlanRequest,
    levels: Mapping[str, Level],
    placements: Sequence[Placement],
    replicas: Sequence[Replica],
    orders: Orders,
    saved: Sequence[str],
) -> Schedule:
    """Reduce the graph to root streams and the nodes that fire on them."""
    at = {placement.node: placement for placement in placements}
    roots = root_streams(graph)
    opened_by = {stream.source for stream in roots}
    nodes = [_node(graph, node, levels, at[node.name]) for node in graph.nodes if node.name not in opened_by]
    saves = [_save(graph, model, at[SAVE_PREFIX + model], request, roots[0].name) for model in saved]
    with_batches = {group for group, _ in orders}
    engines = [replica for replica in replicas if replica.role == "gen"]
    in_turns = [replica for replica in engines if not with_batches.isdisjoint(replica.groups)]
    turn_groups = (*(group for group, _ in orders), *(group for r in in_turns for group in r.groups))
    shared = {g: tuple(r.name for r in in_turns if g in r.groups) for g in turn_groups}
    written = written_models(graph)
    separate = [replica for replica in engines if replica not in in_turns and replica.model in written]
    return Schedule(
        streams=tuple(_stream(graph, root, at, request.batch) for root in roots),
        nodes=(*nodes, *saves),
        orders=orders,
        shared=tuple((group, names) for group, names in shared.items() if names),
        num_steps=request.num_steps if graph.learns else 0,
        publishers=tuple((r.name, batch_replica(replicas, r.model).groups) for r in separate),
        settings=request.schedule,
    )


def _stream(graph: Graph, root: Stream, at: Mapping[str, Placement], batch: int) -> ScheduledStream:
    family = [node for node in graph.nodes if root_stream(graph, node).name == root.name]
    sources = [node for node in family if node.spec.opens_stream]
    return ScheduledStream(
        name=root.name,
        source=root.source,
        group_size=root.group,
        batch=batch if root.trained else None,
        replicas=_distinct(name for node in sources for name in at[node.name].replicas),
        models=_distinct(model for node in sources for model in node.spec.reads_weights),
        min_group=_min_group(family, root.group),
        every=root.every,
        after=root.after,
    )


def _min_group(family: Iterable[Node], group_size: int) -> int:
    """Return the largest `min_group` of any body, at most the size of a whole group."""
    required: list[int] = [node.spec.option("min_group", 1) for node in family]
    return min(max(required), group_size)


def _node(graph: Graph, node: Node, levels: Mapping[str, Level], placement: Placement) -> ScheduledNode:
    return ScheduledNode(
        name=node.name,
        level=levels[node.name],
        stream=root_stream(graph, node).name,
        needs=_needs(graph, node, levels),
        groups=placement.groups if levels[node.name] is Level.BATCH or node.spec.verb == "infer" else (),
        reads=_distinct(
            edge.model
            for edge in graph.edges
            if edge.dst == node.name
            and edge.kind is EdgeKind.WEIGHTS
            and edge.lag > 0
            and not edge.at_most
            and edge.model
        ),
        writes=node.spec.writes_weights,
        keep=returns_keep(node),
        every=node.spec.every,
        after=node.spec.after,
    )


def _needs(graph: Graph, node: Node, levels: Mapping[str, Level]) -> tuple[str, ...]:
    """Return the nodes that must finish before a node.

    Sources of root streams are left out, since nothing can fire before them. A batch node does not list
    per-sample and per-group nodes either, since a batch consists of samples that have passed them all.
    """
    before = set(same_step(graph).before(node.name))
    if not node.spec.opens_stream:
        before.add(graph.stream(node.stream).source)
    roots = {stream.source for stream in root_streams(graph)}
    if levels[node.name] is Level.BATCH:
        before = {name for name in before if levels[name] is Level.BATCH}
    return tuple(other.name for other in graph.nodes if other.name in before - roots)


def _save(graph: Graph, model: str, placement: Placement, request: PlanRequest, stream: str) -> ScheduledNode:
    every = request.save_every or request.num_steps
    return ScheduledNode(
        name=SAVE_PREFIX + model,
        level=Level.BATCH,
        stream=stream,
        needs=tuple(node.name for node in graph.nodes if model in node.spec.writes_weights),
        groups=placement.groups,
        every=every,
        after=every - 1,
        at_end=True,
    )


def _distinct(names: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name is not None))


def group_orders(
    order: Sequence[str], groups_of: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return each group with its batch nodes in cyclic order; groups are in the order of their first node.

    `order` has the batch nodes in topological order, and `groups_of` the device groups of each.
    """
    nodes: dict[str, list[str]] = {}
    for name in order:
        for group in groups_of[name]:
            nodes.setdefault(group, []).append(name)
    return tuple((group, tuple(names)) for group, names in nodes.items())
