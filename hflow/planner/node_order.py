"""When nodes fire: their levels, and the cyclic order of each device group's batch nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import networkx as nx

from hflow.graph.edges import nodes_after_batch
from hflow.graph.ir import EdgeKind, Graph, Level, Node, Stream
from hflow.planner.ir import OrderEdge
from hflow.planner.placement.replicas import is_source, written_models


def same_step(graph: Graph) -> nx.DiGraph[str]:
    """The lag-0 graph: an arc says "before, in the same step"."""
    before: nx.DiGraph[str] = nx.DiGraph()
    before.add_nodes_from(node.name for node in graph.nodes)
    before.add_edges_from((e.src, e.dst) for e in graph.edges if e.lag == 0 and not e.at_most)
    return before


def data_flow(graph: Graph) -> nx.DiGraph[str]:
    """The data edges within a step."""
    flow: nx.DiGraph[str] = nx.DiGraph()
    flow.add_nodes_from(node.name for node in graph.nodes)
    flow.add_edges_from((e.src, e.dst) for e in graph.edges if e.kind is EdgeKind.DATA and e.lag == 0)
    return flow


def topological_order(graph: Graph) -> list[str]:
    """Node names so that lag-0 edges point forward; nodes with a choice keep the recipe's order.

    Every device group takes its cyclic order from this one, so that no two groups can wait for
    each other.
    """
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    return list(nx.lexicographical_topological_sort(same_step(graph), key=position.__getitem__))


def opened_stream(graph: Graph, source: str) -> Stream:
    """The (first) stream that a source opens."""
    return next(stream for stream in graph.streams if stream.source == source)


def root_stream(graph: Graph, node: Node) -> Stream:
    """The stream fed by a dataset whose samples a node works on or opens.

    Streams that one node opens share their samples; the first of them stands for all.
    """
    return graph.root_stream(opened_stream(graph, node.name).name if is_source(node) else node.stream)


def root_streams(graph: Graph) -> tuple[Stream, ...]:
    """The streams that a schedule knows, those that are trained first."""
    roots = dict.fromkeys(root_stream(graph, node).name for node in graph.nodes if is_source(node))
    return tuple(sorted((graph.stream(name) for name in roots), key=lambda stream: not stream.trained))


def firing_levels(graph: Graph) -> dict[str, Level]:
    """When each node fires, by name.

    What can only run once a batch is formed fires at `batch`, whatever its own level. So does a
    per-group inference that no `keep` waits for, and what is behind it, as a whole batch at once is
    cheaper; but not where its model changes in the run, since the graph then grants it older weights.
    """
    flow = data_flow(graph)
    keeps = {node.name for node in graph.nodes if returns_keep(node)}
    written = written_models(graph)
    at_batch = set(nodes_after_batch(graph))
    for node in graph.nodes:
        behind = nx.descendants(flow, node.name)
        reads_frozen = node.spec.verb == "infer" and written.isdisjoint(node.spec.reads_weights)
        if reads_frozen and keeps.isdisjoint({node.name, *behind}):
            at_batch |= {node.name, *behind}
    return {node.name: Level.BATCH if node.name in at_batch else node.spec.level for node in graph.nodes}


def returns_keep(node: Node) -> bool:
    """Whether a node refuses samples or groups."""
    return any(returned.field == "keep" for returned in node.spec.returns)


def group_orders(
    order: Sequence[str], group_of: Mapping[str, str | None]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Group -> its batch nodes in cyclic order; groups in the order of their first node.

    Args:
        order: batch nodes in topological order.
        group_of: batch node -> device group.
    """
    nodes: dict[str, list[str]] = {}
    for name in order:
        group = group_of[name]
        if group is not None:
            nodes.setdefault(group, []).append(name)
    return tuple((group, tuple(names)) for group, names in nodes.items())


def order_edges(orders: Iterable[tuple[str, Sequence[str]]]) -> tuple[OrderEdge, ...]:
    """The order edges of cyclic orders; the last node wraps to the first with lag 1."""
    edges = []
    for group, names in orders:
        edges += [OrderEdge(group, src, dst, 0) for src, dst in pairwise(names)]
        edges.append(OrderEdge(group, names[-1], names[0], 1))
    return tuple(edges)


def stages(graph: Graph) -> list[list[str]]:
    """Node names by stage: a stage needs only stages before it in the same step."""
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    return [sorted(names, key=position.__getitem__) for names in nx.topological_generations(same_step(graph))]
