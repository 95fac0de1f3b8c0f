"""Placement: the device groups, replicas and layouts of a plan, and the workers that each node runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hflow.graph.ir import Graph, Level
from hflow.graph.model import Model
from hflow.planner.choices import choose_engines
from hflow.planner.graph_queries import saved_models, written_models
from hflow.planner.ir import DeviceGroup, EngineChoice, Placement, Replica
from hflow.planner.layout_checks import check_layouts
from hflow.planner.model_shape import num_parameters
from hflow.planner.placement.engine_ranks import order_engine_ranks
from hflow.planner.placement.nodes import NodePlacer
from hflow.planner.placement.placement_setting import apply_placement
from hflow.planner.placement.replicas import place_replicas
from hflow.planner.request import PlanRequest

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

    Args:
        graph: a checked graph.
        request: the cluster, and where each model should run.
        levels: node -> the level at which it fires.

    Raises:
        PlanError: for a placement, group or layout that is invalid or does not fit the cluster or the model.
    """
    request = apply_placement(graph, request)
    groups, replicas = place_replicas(graph, request)
    replicas, engines = choose_engines(replicas, request)
    check_layouts(replicas, request)
    replicas = with_adapters(graph, order_engine_ranks(graph, replicas, request), request)
    placements = NodePlacer(graph, levels, groups, replicas).place(saved_models(graph))
    return PlacedGraph(request, groups, replicas, placements, engines)


def with_adapters(graph: Graph, replicas: tuple[Replica, ...], request: PlanRequest) -> tuple[Replica, ...]:
    """Return the replicas, with what trainers have in adapters, and the frozen replicas that share weights.

    A frozen model that starts as a trained one is the trained model without its adapters. It needs no copy
    if its replica has the backend, layout, workers and precision of the trainer.
    """
    models = {model.name: model for model in graph.models}
    trainers = {r.model: r for r in replicas if r.role == "train" and request.model(r.model).lora}
    written = written_models(graph)
    changed = []
    for replica in replicas:
        model = models[replica.model]
        trainer = trainers.get(_origin(model, request))
        if replica in trainers.values():
            shape = request.trained_shape(replica.model)
            changed.append(replace(replica, adapter_parameters=num_parameters(shape) if shape else 0))
        elif trainer is not None and model.name not in written and _are_alike(replica, trainer, request):
            has_same_head = model.head == models[trainer.model].head
            changed.append(replace(replica, base_of=trainer.name if has_same_head else ""))
        else:
            changed.append(replica)
    return tuple(changed)


def _are_alike(replica: Replica, trainer: Replica, request: PlanRequest) -> bool:
    """Return whether a replica without adapters computes as the trainer does without its own."""
    settings = [
        (r.backend, r.layout, r.workers, request.model(r.model).compute_dtype) for r in (replica, trainer)
    ]
    return replica.role == "infer" and settings[0] == settings[1]


def _origin(model: Model, request: PlanRequest) -> str:
    """Return the model whose weights a model starts from, because nothing else is configured for it."""
    config = request.model(model.name)
    if model.init_from is None:
        return ""
    source = request.model(model.init_from.name)
    is_own = config.path is not None or config.architecture is not None
    same = (config.path, config.architecture) == (source.path, source.architecture)
    return model.init_from.name if same or not is_own else ""
