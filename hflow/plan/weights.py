"""Weight routes: how generation gets the weights that training makes."""

from __future__ import annotations

from typing import Literal

from hflow.graph.ir import Graph
from hflow.plan.ir import Replica, WeightRoute
from hflow.plan.replicas import batch_replica, written_models
from hflow.plan.request import ModelRequest, PlanRequest
from hflow.plan.reshard import with_rows
from hflow.plan.shape import DTYPE_BYTES
from hflow.plan.transport import with_transport


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
            asked = request.models.get(gen.model, ModelRequest())
            if asked.shape is not None:
                route = with_rows(route, src, gen, asked.shape, DTYPE_BYTES[asked.dtype], request.cluster)
            routes.append(with_transport(route, src, gen, asked, request))
    return tuple(routes)


def _how(src: Replica, gen: Replica) -> Literal["shared", "gather", "pull"]:
    if set(src.workers) != set(gen.workers):
        return "pull"
    return "shared" if src.layout.world == gen.layout.world == 1 else "gather"
