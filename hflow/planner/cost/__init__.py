"""Seconds of every node: analytic, from the hardware's figures and the models' sizes.

Nothing here is measured in a run. Each estimate consists of named parts that add up, and each part
says what bounds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hflow.planner.cost.nodes import Costs, Parts
from hflow.planner.cost.roofline import node_time
from hflow.planner.forecast import EdgeTraffic, NodeTime, Pace
from hflow.planner.ir import PUBLISH_PREFIX, Plan
from hflow.planner.request import PlanRequest
from hflow.planner.workload import Workload

__all__ = ["drawing_pace", "node_times"]


def node_times(
    plan: Plan, request: PlanRequest, workload: Mapping[str, Workload], traffic: Sequence[EdgeTraffic]
) -> tuple[NodeTime, ...]:
    """Seconds of the source, the nodes and the engines' replicas of the trained stream.

    A source's seconds are those of one whole batch, a node's of one firing, a replica's (`actor@gen`)
    those of taking new weights, and `publish.actor@gen` those of publishing them. Left out are nodes of side
    streams, as nobody knows here how large their datasets are, and whatever needs a model of unknown sizes.

    Args:
        plan: where everything runs.
        request: what was asked for it; without hardware there are no seconds.
        workload: root stream -> lengths of its samples.
        traffic: bytes that the nodes' inputs move.
    """
    costs = _costs(plan, request, workload, traffic)
    if costs is None:
        return ()
    stream = plan.schedule.streams[0]
    rows = (stream.source, costs.source()), *_nodes(plan, costs)
    return tuple(node_time(name, parts) for name, parts in rows if parts is not None)


def drawing_pace(
    plan: Plan, request: PlanRequest, workload: Mapping[str, Workload], traffic: Sequence[EdgeTraffic]
) -> Pace | None:
    """How fast the trained stream's engines draw single responses; arguments as `node_times`."""
    costs = _costs(plan, request, workload, traffic)
    return None if costs is None else costs.pace()


def _costs(
    plan: Plan, request: PlanRequest, workload: Mapping[str, Workload], traffic: Sequence[EdgeTraffic]
) -> Costs | None:
    if request.hardware is None:
        return None
    stream = plan.schedule.streams[0]
    return Costs(plan, request, request.hardware, workload[stream.name], traffic)


def _nodes(plan: Plan, costs: Costs) -> Iterator[tuple[str, Parts]]:
    for node in plan.schedule.nodes:
        if node.stream == plan.schedule.streams[0].name:
            yield node.name, costs.node(node)
    published = dict(plan.schedule.publishers)
    for route in plan.weights:
        if route.dst in published:
            yield PUBLISH_PREFIX + route.dst, costs.publishing(route)
        yield route.dst, costs.weights(route)
