"""On which replica, group and workers every node runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx

from hflow.graph.ir import Graph, Level, Node
from hflow.planner.ir import DeviceGroup, Placement, Replica
from hflow.planner.node_order import data_flow, root_stream, topological_order
from hflow.planner.placement.replicas import batch_replica, gen_replica, is_source

SAVE_PREFIX = "save."
"""Saving model NAME is the node `save.NAME`."""


class NodePlacer:
    """Places the nodes of one graph on replicas that have devices already."""

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
        """Every node's placement in the recipe's order, then those that save models."""
        for name in self._order:
            node = self._graph.node(name)
            if not is_source(node) and self._uses(node):
                self._placed[name] = self._on_replicas(node)
        for name in self._order:
            if self._levels[name] is Level.BATCH and name not in self._placed:
                self._placed[name] = self._on_one_worker(name)
        for name in self._order:
            if is_source(self._graph.node(name)):
                self._placed[name] = self._source(self._graph.node(name))
        for name in self._order:
            if name not in self._placed:
                self._placed[name] = Placement(name, None, (), self._root_heads(self._graph.node(name)))
        return (*(self._placed[node.name] for node in self._graph.nodes), *map(self._save, saved))

    def _uses(self, node: Node) -> tuple[Replica, ...]:
        """Replicas whose weights a node writes or reads, the written first."""
        models = dict.fromkeys((*node.spec.writes_weights, *node.spec.reads_weights))
        return tuple(batch_replica(self._replicas, model) for model in models)

    def _on_replicas(self, node: Node) -> Placement:
        uses = self._uses(node)
        return Placement(node.name, uses[0].group, tuple(r.name for r in uses), uses[0].heads)

    def _on_one_worker(self, name: str) -> Placement:
        """The first worker of the group that makes its inputs, or else that reads its outputs."""
        before = [src for src in self._order if src in nx.ancestors(self._flow, name)]
        after = [dst for dst in self._order if dst in nx.descendants(self._flow, name)]
        in_turns = [
            n for n in (*before[::-1], *after) if n in self._placed and self._levels[n] is Level.BATCH
        ]
        near = (self._placed[other].group for other in in_turns)
        group = next((found for found in near if found is not None), next(iter(self._first_worker)))
        return Placement(name, group, (), (self._first_worker[group],))

    def _source(self, node: Node) -> Placement:
        """A source runs beside its engines; one without, where most of its readers' ranks are."""
        engines = [gen_replica(self._replicas, model) for model in node.spec.reads_weights]
        if engines:
            return Placement(node.name, engines[0].group, tuple(r.name for r in engines), engines[0].heads)
        if root_stream(self._graph, node).source != node.name:
            return Placement(node.name, None, (), self._root_heads(node))
        readers = [self._placed[n].heads for n in nx.descendants(self._flow, node.name) if n in self._placed]
        first = (next(iter(self._first_worker.values())),)
        return Placement(node.name, None, (), max((first, *sorted(readers)), key=len))

    def _root_heads(self, node: Node) -> tuple[int, ...]:
        """Per-sample and per-group work stays where its samples were made."""
        return self._placed[root_stream(self._graph, node).source].heads

    def _save(self, model: str) -> Placement:
        replica = batch_replica(self._replicas, model)
        return Placement(SAVE_PREFIX + model, replica.group, (replica.name,), replica.heads)
