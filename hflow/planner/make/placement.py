"""Placement: a plan's device groups, replicas and layouts, and the workers of each node (`NodePlacer`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hflow.base.errors import PlanError
from hflow.graph.ir import Graph, Level, Node
from hflow.graph.model import Model
from hflow.graph.queries import data_flow, root_stream, saved_models, topological_order, written_models
from hflow.planner.checks.layouts import check_layouts
from hflow.planner.make.engine_ranks import order_engine_ranks
from hflow.planner.make.placement_setting import apply_placement
from hflow.planner.make.replicas import place_replicas
from hflow.planner.models.choices import choose_engines
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import (
    SAVE_PREFIX,
    DeviceGroup,
    EngineChoice,
    Placement,
    Replica,
    batch_replica,
    generation_replica,
)
from hflow.planner.plan.traits import traits
from hflow.shapes.model_shape import num_parameters

__all__ = ["PlacedGraph", "place_graph"]


@dataclass(frozen=True)
class PlacedGraph:
    """A graph whose replicas and nodes have devices."""

    request: PlanRequest
    """The request with the groups and layouts that its `placement` stands for."""
    groups: tuple[DeviceGroup, ...]
    replicas: tuple[Replica, ...]
    placements: tuple[Placement, ...]
    """One for each node in the recipe's order, then one for each node that saves a model."""
    engines: tuple[EngineChoice, ...]
    """The engine of each generation replica, and the reason."""


def place_graph(graph: Graph, request: PlanRequest, levels: Mapping[str, Level]) -> PlacedGraph:
    """Place every replica and every node of a graph on devices.

    Raises:
        PlanError: for a placement, group or layout that is invalid or does not fit the cluster or the model.
    """
    request = with_bases_placed(apply_placement(graph, request))
    groups, replicas = place_replicas(graph, request)
    replicas, engines = choose_engines(replicas, request)
    check_layouts(replicas, request)
    replicas = with_adapters(graph, order_engine_ranks(graph, replicas, request), request)
    placements = NodePlacer(graph, levels, groups, replicas).place(saved_models(graph))
    return PlacedGraph(request, groups, replicas, placements, engines)


def with_bases_placed(request: PlanRequest) -> PlanRequest:
    """Return the request with the places of models that use the weights of others: those of the others."""
    models = dict(request.models)
    for name, config in request.models.items():
        if config.base_of is not None:
            owner = request.model(config.base_of)
            gen = replace(
                config.gen,
                engine=config.gen.engine or owner.gen.engine,
                layout=config.gen.layout or owner.gen.layout,
                group=config.gen.group or owner.gen.group,
            )
            models[name] = replace(
                config, layout=config.layout or owner.layout, group=config.group or owner.group, gen=gen
            )
    return replace(request, models=models)


def with_adapters(graph: Graph, replicas: tuple[Replica, ...], request: PlanRequest) -> tuple[Replica, ...]:
    """Return the replicas, with trainers' adapters, and those that use the weights of another one.

    A frozen model that starts as a trained one is the trained model without its adapters, and models with
    `base_of` have adapters of their own or none. They need no copy if their replica has the backend, layout,
    workers and precision of the other one. The same holds for their engines.
    """
    models = {model.name: model for model in graph.models}
    trainers = {r.model: r for r in replicas if r.role == "train" and request.model(r.model).lora}
    engines = {r.model: r for r in replicas if r.role == "gen"}
    written = written_models(graph)
    changed = []
    for replica in replicas:
        model, asked = models[replica.model], request.model(replica.model).base_of
        if replica.role == "gen":
            owner = engines.get(asked or "")
        elif replica in trainers.values():
            shape = request.trained_shape(replica.model)
            replica = replace(replica, adapter_parameters=num_parameters(shape) if shape else 0)
            owner = trainers.get(asked or "")
        else:
            owner = None if model.name in written else trainers.get(asked or _origin(model, request))
        if owner is not None:
            has_same_head = replica.role != "infer" or model.head == models[owner.model].head
            if has_same_head and _are_alike(replica, owner, request):
                replica = replace(replica, base_of=owner.name)
            elif replica.role == "infer":
                _check_copied_base(replica, owner, request)
        changed.append(replica)
    return tuple(changed)


def _check_copied_base(replica: Replica, trainer: Replica, request: PlanRequest) -> None:
    """Refuse a copy of weights that the trainer has in 4 bits, as it would have others."""
    lora, key = request.model(trainer.model).lora, f"models.{trainer.model}.lora.base"
    if lora is not None and lora.base is not None:
        raise PlanError(
            f"{key} is {lora.base}, and {replica.name} would have a copy of the weights that is not rounded; "
            f"give it the devices, layout, backend and dtype of {trainer.name}, or remove {key}"
        )


def _are_alike(replica: Replica, owner: Replica, request: PlanRequest) -> bool:
    """Return whether a replica computes with the frozen weights of another one as that does."""
    configs = [request.model(r.model) for r in (replica, owner)]
    settings = [
        (r.backend, r.layout, r.workers, r.merges_adapters, config.compute_dtype, config.gen.precisions)
        for r, config in zip((replica, owner), configs, strict=True)
    ]
    if replica.role == "gen":
        is_beside = not owner.merges_adapters and traits(replica.backend).shares_base
        return settings[0] == settings[1] and is_beside
    has_other_kernels = configs[0].kernels == "transformer_engine" or configs[0].fp8 is not None
    return settings[0][:-1] == settings[1][:-1] and not has_other_kernels


def _origin(model: Model, request: PlanRequest) -> str:
    """Return the model whose weights a model starts from, because nothing else is configured for it."""
    config = request.model(model.name)
    if model.init_from is None:
        return ""
    source = request.model(model.init_from.name)
    is_own = config.path is not None or config.architecture is not None
    same = (config.path, config.architecture) == (source.path, source.architecture)
    return model.init_from.name if same or not is_own else ""


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
                self._placed[name] = Placement(name, (), (), self._source_dp_heads(self._graph.node(name)))
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
        before = [src for src in self._order if src in self._flow.ancestors(name)]
        after = [dst for dst in self._order if dst in self._flow.descendants(name)]
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
            return Placement(node.name, (), (), self._source_dp_heads(node))
        readers = [self._placed[n].heads for n in self._flow.descendants(node.name) if n in self._placed]
        first = (next(iter(self._first_worker.values())),)
        return Placement(node.name, (), (), max((first, *sorted(readers)), key=len))

    def _source_dp_heads(self, node: Node) -> tuple[int, ...]:
        """Return the workers that make a node's samples: per-sample and per-group nodes run there."""
        return self._placed[root_stream(self._graph, node).source].heads

    def _save(self, model: str) -> Placement:
        replica = batch_replica(self._replicas, model)
        return Placement(SAVE_PREFIX + model, replica.groups, (replica.name,), replica.heads)
