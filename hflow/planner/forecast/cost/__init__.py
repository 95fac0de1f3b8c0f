"""Estimated seconds of every node, from the hardware's data sheet and the models' sizes.

Nothing here is measured in a run. Each estimate is a sum of named parts, and each part names its limit.
`nodes` puts the parts together; `flops`, `roofline` and `collectives` are the basic formulas; `training`,
`generation` and `transfers` estimate the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hflow.planner.forecast.cost.explain import Explanation, Term, explain_node
from hflow.planner.forecast.cost.nodes import Costs, Parts
from hflow.planner.forecast.cost.roofline import node_time
from hflow.planner.plan.forecast import EdgeTraffic, NodeTime, Pace
from hflow.planner.plan.request import PlanRequest, stream_workloads
from hflow.planner.plan.rows import PUBLISH_PREFIX, Plan
from hflow.planner.plan.workload import Workload

__all__ = ["Explanation", "Term", "explain", "generation_pace", "node_times"]


def node_times(
    plan: Plan, request: PlanRequest, workload: Mapping[str, Workload], traffic: Sequence[EdgeTraffic]
) -> tuple[NodeTime, ...]:
    """Estimate the seconds of the source, the nodes and the engines of the trained stream.

    The source has the seconds of one whole batch, a node those of one execution, an engine (`actor@gen`)
    those of loading new weights, and `publish.actor@gen` those of publishing them. Nodes of other streams are
    left out, as the sizes of their datasets are not known here, and so is what needs a model of unknown
    sizes. Everything in the plan has its devices, and the request is the one that it was compiled from.
    """
    costs = _make_costs(plan, request, workload, traffic)
    stream = plan.schedule.streams[0]
    rows = (stream.source, costs.source()), *_nodes(plan, costs)
    return tuple(node_time(name, parts) for name, parts in rows if parts is not None)


def generation_pace(
    plan: Plan, request: PlanRequest, workload: Mapping[str, Workload], traffic: Sequence[EdgeTraffic]
) -> Pace | None:
    """Estimate how fast the engines of the trained stream generate. Arguments as for `node_times`."""
    return _make_costs(plan, request, workload, traffic).pace()


def explain(plan: Plan, request: PlanRequest, name: str) -> Explanation:
    """Unfold the seconds of a node of the trained stream, an engine (`actor@gen`), or `publish.actor@gen`.

    Raises:
        PlanError: for an unknown name, or a model whose sizes the planner does not know.
    """
    workload = dict(stream_workloads(plan, request))
    return explain_node(plan, _make_costs(plan, request, workload, plan.forecast.traffic), name)


def _make_costs(
    plan: Plan, request: PlanRequest, workload: Mapping[str, Workload], traffic: Sequence[EdgeTraffic]
) -> Costs:
    stream = plan.schedule.streams[0]
    return Costs(plan, request, workload[stream.name], traffic)


def _nodes(plan: Plan, costs: Costs) -> Iterator[tuple[str, Parts]]:
    for node in plan.schedule.nodes:
        if node.stream == plan.schedule.streams[0].name:
            yield node.name, costs.node(node)
    published = dict(plan.schedule.publishers)
    for route in plan.weights:
        if route.dst in published:
            yield PUBLISH_PREFIX + route.dst, costs.publish_weights(route)
        yield route.dst, costs.weights(route)
