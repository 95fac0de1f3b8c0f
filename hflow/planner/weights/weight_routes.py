"""Weight routes: how generation gets the weights that training makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hflow.config.schema import ModelConfig
from hflow.graph.ir import Graph
from hflow.planner.graph_queries import written_models
from hflow.planner.hardware import GIB
from hflow.planner.ir import Replica, WeightRoute, batch_replica
from hflow.planner.model_shape import DTYPE_BYTES
from hflow.planner.request import PlanRequest
from hflow.planner.weights.resharding import with_rows

# -------------------- Which way published weights take between processes.


STORE_SHARE = 0.3
"""The part of a machine's memory that Ray's object store takes by itself."""


def with_transport(
    route: WeightRoute, src: Replica, gen: Replica, asked: ModelConfig, request: PlanRequest
) -> WeightRoute:
    """The route with its transport; only weights that are pulled need one.

    Left to the plan it is the object store: memory that processes of a machine share, and that others fetch
    from once. It is the disk where a version does not fit into it, as far as the machine's memory is known.
    """
    if route.how != "pull":
        return route
    if asked.gen.transport != "auto":
        return replace(route, transport=asked.gen.transport, why="as configured")
    room = _room(request)
    machines = {request.cluster.node_of(worker) for worker in src.workers}
    most = route.moved_bytes / gen.layout.data / len(machines)
    if room is not None and most > room:
        why = f"a version has {most / GIB:.1f} GiB on a machine, its object store about {room / GIB:.1f}"
        return replace(route, transport="disk", why=why)
    return replace(route, transport="store", why="memory that processes share")


def _room(request: PlanRequest) -> float | None:
    """Bytes of a machine's object store; None where the host's memory is not known."""
    if request.hardware is None or request.hardware.device.type != "cpu":
        return None
    return STORE_SHARE * request.hardware.device.memory_bytes * request.cluster.devices_per_node


def weight_routes(
    graph: Graph, replicas: tuple[Replica, ...], request: PlanRequest
) -> tuple[WeightRoute, ...]:
    """One route for every generation replica whose model changes in the run.

    The weights of a model that nobody writes are loaded once, by every replica for itself. Routes of
    models whose sizes are known have rows; entries travel in the dtype that engines hold.
    """
    written = written_models(graph)
    routes = []
    for gen in replicas:
        if gen.role == "gen" and gen.model in written:
            src = batch_replica(replicas, gen.model)
            route = WeightRoute(gen.model, src.name, gen.name, _how(src, gen))
            asked, shape = request.model(gen.model), request.shapes.get(gen.model)
            if shape is not None:
                route = with_rows(route, src, gen, shape, DTYPE_BYTES[asked.compute_dtype], request.cluster)
            routes.append(with_transport(route, src, gen, asked, request))
    return tuple(routes)


def _how(src: Replica, gen: Replica) -> Literal["shared", "gather", "pull"]:
    if set(src.workers) != set(gen.workers):
        return "pull"
    return "shared" if src.layout.world == gen.layout.world == 1 else "gather"
