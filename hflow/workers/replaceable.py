"""The workers of a plan whose process can be replaced while the run continues."""

from __future__ import annotations

from hflow.graph.ir import Level
from hflow.planner.plan.rows import Plan, Replica


def replaceable_workers(plan: Plan) -> dict[int, str]:
    """Return the workers that can be replaced, each with its generation replica.

    Such a worker does nothing but generate, and run sample and group nodes. Its engine, which may have
    several ranks, is sent weights by any transport.
    """
    workers = range(plan.cluster.num_devices)
    used = {worker: [r for r in plan.replicas if worker in r.workers] for worker in workers}
    return {
        worker: replicas[0].name
        for worker, replicas in used.items()
        if len(replicas) == 1 and _is_replaceable(worker, replicas[0], plan)
    }


def _is_replaceable(worker: int, replica: Replica, plan: Plan) -> bool:
    if replica.role != "gen":
        return False
    runs_batches = {node.name for node in plan.schedule.nodes if node.level is Level.BATCH or node.groups}
    if any(worker in placement.heads for placement in plan.placements if placement.node in runs_batches):
        return False
    routes = [route for route in plan.weights if route.dst == replica.name]
    return all(route.how == "pull" for route in routes)
