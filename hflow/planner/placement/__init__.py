"""Placement: the device groups, replicas and layouts of a plan, and the workers that each node runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hflow.graph.ir import Graph, Level
from hflow.planner.graph_queries import saved_models
from hflow.planner.ir import DeviceGroup, EngineChoice, Placement, Replica
from hflow.planner.layout_checks import check_layouts
from hflow.planner.placement.adapters import with_adapters
from hflow.planner.placement.engine_ranks import order_engine_ranks
from hflow.planner.placement.engines import choose_engines
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
