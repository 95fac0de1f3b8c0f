"""`build_graph`: convert what a recipe declares to a checked graph. A pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import networkx as nx

from hflow.graph.binding import bind_node, unbound_notes
from hflow.graph.check import check_graph, warnings_of
from hflow.graph.edges import data_edges, overwrite_edges, same_step_order, state_edges, weight_edges
from hflow.graph.field_table import build_field_table
from hflow.graph.framework_reads import check_prox, check_routing_replay, resolve_prox, unread_prox
from hflow.graph.ir import Edge, Graph, Node, RecipeSpec, Stream
from hflow.graph.streams import assign_streams
from hflow.graph.tensordicts import add_tensordict_reads


def build_graph(spec: RecipeSpec) -> Graph:
    """Bind every parameter to a field, derive the edges and check the graph.

    The nodes are in an order in which they can run within a step; where several could be next, in the order
    of the recipe.

    Raises:
        RecipeError: if the recipe is wrong. The message has file:line, function, parameter and, for an
            unknown name, the most similar one.
    """
    assignment = assign_streams(spec)
    check_prox(spec, assignment)
    spec = resolve_prox(spec, assignment)
    fields = build_field_table(spec, assignment)
    bound = [bind_node(node, spec, assignment, fields) for node in spec.nodes]
    skipped = list(unread_prox(bound))
    nodes = add_tensordict_reads([node for node in bound if node not in skipped], fields)
    edges = _edges(nodes, assignment.streams)
    graph = Graph(
        name=spec.name,
        dataset=spec.dataset,
        nodes=tuple(nodes),
        edges=tuple(edges),
        streams=assignment.streams,
        models=spec.models,
        datasets=spec.datasets,
        skipped=tuple(node.name for node in skipped if not node.spec.implicit),
        notes=tuple(note for node in nodes for note in unbound_notes(node, spec, assignment, fields)),
    )
    check_graph(graph)
    check_routing_replay(graph)
    return replace(graph, nodes=_in_order(nodes, edges), warnings=tuple(warnings_of(graph, spec)))


def _edges(nodes: Sequence[Node], streams: Sequence[Stream]) -> list[Edge]:
    return [
        *data_edges(nodes, streams),
        *state_edges(nodes),
        *weight_edges(nodes, streams),
        *overwrite_edges(nodes, streams),
    ]


def _in_order(nodes: Sequence[Node], edges: Sequence[Edge]) -> tuple[Node, ...]:
    """Sort nodes by their edges of lag 0."""
    position = {node.name: i for i, node in enumerate(nodes)}
    order = same_step_order(edges)
    order.add_nodes_from(position)
    return tuple(
        nodes[position[name]] for name in nx.lexicographical_topological_sort(order, position.__getitem__)
    )
