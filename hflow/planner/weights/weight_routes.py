"""`weight_routes`: how generation replicas get the weights that training changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hflow.config.schema import ModelConfig
from hflow.graph.ir import Graph
from hflow.planner.backends import engine_kind
from hflow.planner.graph_queries import written_models
from hflow.planner.hardware import GIB
from hflow.planner.ir import Replica, WeightRoute, batch_replica
from hflow.planner.model_shape import DTYPE_BYTES
from hflow.planner.request import PlanRequest
from hflow.planner.weights.resharding import add_rows

STORE_FRACTION = 0.3
"""The fraction of a machine's memory that Ray gives its object store by default."""


def weight_routes(
    graph: Graph, replicas: tuple[Replica, ...], request: PlanRequest
) -> tuple[WeightRoute, ...]:
    """Return one route for every generation replica whose model changes during the run.

    Weights that do not change are loaded once by each replica, without a route. Routes of models with known
    sizes have rows; entries move in the dtype that engines hold.
    """
    written = written_models(graph)
    routes = []
    for gen in replicas:
        if gen.role == "gen" and gen.model in written:
            src = batch_replica(replicas, gen.model)
            route = WeightRoute(gen.model, src.name, gen.name, _how(src, gen))
            config, shape = request.model(gen.model), request.shapes.get(gen.model)
            if shape is not None:
                route = add_rows(route, src, gen, shape, DTYPE_BYTES[config.compute_dtype], request.cluster)
            routes.append(_with_transport(route, src, gen, config, request))
    return tuple(routes)


def _how(src: Replica, gen: Replica) -> Literal["shared", "gather", "pull"]:
    if set(src.workers) != set(gen.workers) or engine_kind(gen.backend).has_own_process:
        return "pull"
    return "shared" if src.layout.world == gen.layout.world == 1 else "gather"


def _with_transport(
    route: WeightRoute, src: Replica, gen: Replica, config: ModelConfig, request: PlanRequest
) -> WeightRoute:
    """Return the route with its transport, which only a `pull` route has.

    By default it is the object store: memory that the processes of a machine share, and that each other
    machine fetches once. It is the disk if a version does not fit into the store, as far as the memory is
    known.
    """
    if route.how != "pull":
        return route
    if config.gen.transport != "auto":
        return replace(route, transport=config.gen.transport, why="as configured")
    store_bytes = _store_bytes(request)
    machines = {request.cluster.node_of(worker) for worker in src.workers}
    num_bytes = route.moved_bytes / gen.layout.data / len(machines)
    if store_bytes is not None and num_bytes > store_bytes:
        why = (
            f"a version takes {num_bytes / GIB:.1f} GiB per machine, but the object store has only about "
            f"{store_bytes / GIB:.1f} GiB"
        )
        return replace(route, transport="disk", why=why)
    return replace(route, transport="store", why="memory that processes share")


def _store_bytes(request: PlanRequest) -> float | None:
    """Return the bytes of a machine's object store; None if the memory of the machine is not known."""
    if request.hardware is None or request.hardware.device.type != "cpu":
        return None
    return STORE_FRACTION * request.hardware.device.memory_bytes * request.cluster.devices_per_node
