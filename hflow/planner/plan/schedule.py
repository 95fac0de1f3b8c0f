"""Questions about a plan's schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from hflow.graph.ir import Level
from hflow.graph.queries import num_firings
from hflow.planner.plan.rows import (
    OrderEdge,
    Plan,
    Replica,
    Schedule,
    ScheduledNode,
)


def shared_groups(schedule: Schedule, replica: str) -> tuple[str, ...]:
    """Return the groups of a generation replica if it shares devices with batch nodes, or none."""
    return tuple(group for group, names in schedule.shared if replica in names)


def trains_on_engine_devices(schedule: Schedule, engine: Replica) -> bool:
    """Return whether nodes change an engine's model, each of them on some of the engine's devices."""
    groups = set(shared_groups(schedule, engine.name))
    writers = [node for node in schedule.nodes if engine.model in node.writes]
    return bool(writers) and all(not groups.isdisjoint(node.groups) for node in writers)


def share_of_unchanged_wakes(schedule: Schedule, engine: str, *, trains_on_its_devices: bool) -> float:
    """Return the fraction of steps in which an engine that sleeps may wake with the version that it had.

    An engine that generates the trained stream, beside the nodes that change its model, gets new weights at
    each sync. Any other engine may wake with the same version each time. This is known before a run; during
    one, `runtime/state/weight_updates.py` decides each time whether an engine keeps its weights.
    `trains_on_its_devices` is the result of `trains_on_engine_devices`, or an assumption.
    """
    serves_trained_stream = any(s.batch is not None and engine in s.replicas for s in schedule.streams)
    if not serves_trained_stream or not trains_on_its_devices:
        return 1.0
    return 1 - 1 / schedule.settings.sync_every


def streaming_groups(schedule: Schedule) -> tuple[str, ...]:
    """Return the device groups on which models run as samples and groups arrive."""
    batch = Level.BATCH
    return tuple(dict.fromkeys(g for node in schedule.nodes if node.level is not batch for g in node.groups))


def streaming_queues(schedule: Schedule) -> tuple[tuple[str, tuple[ScheduledNode, ...]], ...]:
    """Return the nodes that run on devices as samples and groups arrive, by the queue that they wait in.

    Nodes with common devices wait in the same queue, and so do those that are connected by others. It has the
    name of the first device group of its first node.
    """
    nodes = [node for node in schedule.nodes if node.level is not Level.BATCH and node.groups]
    queues: list[list[ScheduledNode]] = []
    for node in nodes:
        joined = [q for q in queues if any(not set(n.groups).isdisjoint(node.groups) for n in q)]
        queues = [queue for queue in queues if queue not in joined]
        queues.append([*(member for queue in joined for member in queue), node])
    members = (sorted(queue, key=nodes.index) for queue in queues)
    return tuple((queue[0].groups[0], tuple(queue)) for queue in members)


def scheduled_updates(plan: Plan, num_steps: int) -> Mapping[str, int]:
    """Return trained model -> its optimizer steps in the first `num_steps` steps, if none is skipped."""
    cuts, updates = dict(plan.cuts), Counter[str]()
    for node in plan.graph.nodes:
        if node.name in cuts:
            cut = cuts[node.name]
            for model in node.spec.writes_weights:
                updates[model] += num_firings(node.spec, num_steps) * cut.minibatches * cut.epochs
    return updates


def order_edges(orders: Iterable[tuple[str, Sequence[str]]]) -> tuple[OrderEdge, ...]:
    """Return the edges of cyclic orders; the last node wraps to the first with lag 1."""
    groups_of: dict[tuple[str, str, int], tuple[str, ...]] = {}
    for group, names in orders:
        for edge in (*((src, dst, 0) for src, dst in pairwise(names)), (names[-1], names[0], 1)):
            groups_of[edge] = (*groups_of.get(edge, ()), group)
    return tuple(OrderEdge(groups, *edge) for edge, groups in groups_of.items())
