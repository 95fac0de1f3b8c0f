"""Weight routes: how generation gets the weights that training makes."""

from __future__ import annotations

from typing import Literal

from hflow.graph.ir import Graph
from hflow.plan.ir import Replica, WeightRoute
from hflow.plan.replicas import batch_replica, written_models


def weight_routes(graph: Graph, replicas: tuple[Replica, ...]) -> tuple[WeightRoute, ...]:
    """One route for every generation replica whose model changes in the run.

    The weights of a model that nobody writes are loaded once, by every replica for itself.
    """
    written = written_models(graph)
    routes = []
    for gen in replicas:
        if gen.role == "gen" and gen.model in written:
            src = batch_replica(replicas, gen.model)
            routes.append(WeightRoute(gen.model, src.name, gen.name, _how(src, gen)))
    return tuple(routes)


def _how(src: Replica, gen: Replica) -> Literal["shared", "gather", "pull"]:
    if set(src.workers) != set(gen.workers):
        return "pull"
    return "shared" if src.layout.world == gen.layout.world == 1 else "gather"
