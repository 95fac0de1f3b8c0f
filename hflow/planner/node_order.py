"""When nodes fire: their levels, and the cyclic order of the batch nodes of each device group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import networkx as nx

from hflow.graph.edges import nodes_after_batch
from hflow.graph.ir import EdgeKind, Graph, Level
from hflow.planner.graph_queries import returns_keep, written_models
from hflow.planner.ir import OrderEdge


def same_step(graph: Graph) -> nx.DiGraph[str]:
    """Return the graph of lag-0 edges: an arc means "before, in the same step"."""
    before: nx.DiGraph[str] = nx.DiGraph()
    before.add_nodes_from(node.name for node in graph.nodes)
    before.add_edges_from((e.src, e.dst) for e in graph.edges if e.lag == 0 and not e.at_most)
    return before


def data_flow(graph: Graph) -> nx.DiGraph[str]:
    """Return the graph of the data edges within a step."""
    flow: nx.DiGraph[str] = nx.DiGraph()
    flow.add_nodes_from(node.name for node in graph.nodes)
    flow.add_edges_from((e.src, e.dst) for e in graph.edges if e.kind is EdgeKind.DATA and e.lag == 0)
    return flow


def topological_order(graph: Graph) -> list[str]:
    """Return node names in an order in which lag-0 edges point forward; ties keep the recipe's order.

    Every device group takes its cyclic order from this one, so no two groups can wait for each other.
    """
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    return list(nx.lexicographical_topological_sort(same_step(graph), key=position.__getitem__))


def firing_levels(graph: Graph) -> dict[str, Level]:
    """Return the level at which each node fires, by name.

    A node that can only run once a batch is formed fires at `batch`, whatever its own level. So does an
    inference that no `keep` depends on, with all nodes after it, as a whole batch at once is cheaper. An
    exception is an inference whose model changes during the run: the graph allows it older weights.
    """
    flow = data_flow(graph)
    keeps = {node.name for node in graph.nodes if returns_keep(node)}
    written = written_models(graph)
    at_batch = set(nodes_after_batch(graph))
    for node in graph.nodes:
        later = nx.descendants(flow, node.name)
        reads_frozen = node.spec.verb == "infer" and written.isdisjoint(node.spec.reads_weights)
        if reads_frozen and keeps.isdisjoint({node.name, *later}):
            at_batch |= {node.name, *later}
    return {node.name: Level.BATCH if node.name in at_batch else node.spec.level for node in graph.nodes}


def group_orders(
    order: Sequence[str], groups_of: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return each group with its batch nodes in cyclic order; groups are in the order of their first node.

    Args:
        order: batch nodes in topological order.
        groups_of: batch node -> the device groups that it runs on.
    """
    nodes: dict[str, list[str]] = {}
    for name in order:
        for group in groups_of[name]:
            nodes.setdefault(group, []).append(name)
    return tuple((group, tuple(names)) for group, names in nodes.items())


def order_edges(orders: Iterable[tuple[str, Sequence[str]]]) -> tuple[OrderEdge, ...]:
    """Return the edges of cyclic orders; the last node wraps to the first with lag 1."""
    groups_of: dict[tuple[str, str, int], tuple[str, ...]] = {}
    for group, names in orders:
        for edge in (*((src, dst, 0) for src, dst in pairwise(names)), (names[-1], names[0], 1)):
            groups_of[edge] = (*groups_of.get(edge, ()), group)
    return tuple(OrderEdge(groups, *edge) for edge, groups in groups_of.items())


def stages(graph: Graph) -> list[list[str]]:
    """Return node names by stage: a stage depends only on earlier stages of the same step."""
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    return [sorted(names, key=position.__getitem__) for names in nx.topological_generations(same_step(graph))]
