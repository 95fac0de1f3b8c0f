"""`NodePlacer`: the replicas, device groups and workers of every node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx

from hflow.graph.ir import Graph, Level, Node
from hflow.planner.graph_queries import root_stream
from hflow.planner.ir import (
    SAVE_PREFIX,
    DeviceGroup,
    Placement,
    Replica,
    batch_replica,
    generation_replica,
)
from hflow.planner.node_order import data_flow, topological_order


class NodePlacer:
    """Places the nodes of one graph on replicas that already have devices."""

    def __init__(
        self,
        graph: Graph,
        levels: Mapping[str, Level],
        groups: Sequence[DeviceGroup],
        replicas: tuple[Replica, ...],
    ) -> None:
        self._graph = graph
        self._levels = levels
        self._replicas = replicas
        self._first_worker = {group.name: group.devices[0] for group in groups}
        self._order = topological_order(graph)
        self._flow = data_flow(graph)
        self._placed: dict[str, Placement] = {}

    def place(self, saved: Sequence[str]) -> tuple[Placement, ...]:
        """Return the placement of every node in the recipe's order, then of the nodes that save models.

        Nodes with models come first, as the others are placed by them.
        """
        for name in self._order:
            node = self._graph.node(name)
            if not node.spec.opens_stream and self._replicas_of(node):
                self._placed[name] = self._on_replicas(node)
        for name in self._order:
            if self._levels[name] is Level.BATCH and name not in self._placed:
                self._placed[name] = self._on_one_worker(name)
        for name in self._order:
            if self._graph.node(name).spec.opens_stream:
                self._placed[name] = self._source(self._graph.node(name))
        for name in self._order:
            if name not in self._placed:
                self._placed[name] = Placement(name, (), (), self._source_heads(self._graph.node(name)))
        return (*(self._placed[node.name] for node in self._graph.nodes), *map(self._save, saved))

    def _replicas_of(self, node: Node) -> tuple[Replica, ...]:
        """Return the replicas whose weights a node writes or reads, the written ones first."""
        models = dict.fromkeys((*node.spec.writes_weights, *node.spec.reads_weights))
        return tuple(batch_replica(self._replicas, model) for model in models)

    def _on_replicas(self, node: Node) -> Placement:
        replicas = self._replicas_of(node)
        return Placement(node.name, replicas[0].groups, tuple(r.name for r in replicas), replicas[0].heads)

    def _on_one_worker(self, name: str) -> Placement:
        """Place a node on the first worker of the group that makes its inputs, or else reads its outputs."""
        before = [src for src in self._order if src in nx.ancestors(self._flow, name)]
        after = [dst for dst in self._order if dst in nx.descendants(self._flow, name)]
        neighbours = [
            n for n in (*before[::-1], *after) if n in self._placed and self._levels[n] is Level.BATCH
        ]
        groups = (self._placed[neighbour].groups for neighbour in neighbours)
        group = next((names[0] for names in groups if names), next(iter(self._first_worker)))
        return Placement(name, (group,), (), (self._first_worker[group],))

    def _source(self, node: Node) -> Placement:
        """Place a source beside its engines; without engines, on the most workers that any reader has."""
        engines = [generation_replica(self._replicas, model) for model in node.spec.reads_weights]
        if engines:
            return Placement(node.name, engines[0].groups, tuple(r.name for r in engines), engines[0].heads)
        if root_stream(self._graph, node).source != node.name:
            return Placement(node.name, (), (), self._source_heads(node))
        readers = [self._placed[n].heads for n in nx.descendants(self._flow, node.name) if n in self._placed]
        first = (next(iter(self._first_worker.values())),)
        return Placement(node.name, (), (), max((first, *sorted(readers)), key=len))

    def _source_heads(self, node: Node) -> tuple[int, ...]:
        """Return the workers that make a node's samples: per-sample and per-group nodes run there."""
        return self._placed[root_stream(self._graph, node).source].heads

    def _save(self, model: str) -> Placement:
        replica = batch_replica(self._replicas, model)
        return Placement(SAVE_PREFIX + model, replica.groups, (replica.name,), replica.heads)
