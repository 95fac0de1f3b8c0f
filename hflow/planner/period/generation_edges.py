"""How generation follows the weights: turns, staleness, and engines that take new weights.

An engine's devices go through turns: it takes new weights where a sync is due, then generates one
batch; on a shared group, the group's batch nodes come next. Synchronous generation does just that. With
staleness, new weights interrupt what is generating, and its samples go on afterwards; here they come
before the first batch that has to have them (where a part of one may be begun without them, all of it is
here). The engine does the same work in a round, so the pace is the same too as long as taking weights is
short; the tests show where.

A model that runs as samples or groups arrive has its devices for itself. Its seconds are those of a whole
batch, which it takes up when the batch is generated, and it works on one batch after another.

Weights of an engine with devices of its own are published first, on the devices that hold them: in their
order that is right behind the writers. Those of the next step wait for that, and for no more. With eta = 1
the run may be slower than this by up to a half of the loading, which comes in the midst of a batch.

A source's seconds are those that its engines need for a whole batch, so they make one batch after
another. A run with samples of two batches in flight is faster than that where its engines have room.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from hflow.graph.edges import steps_ahead
from hflow.planner.ir import PUBLISH_PREFIX
from hflow.planner.period.steady_events import SteadyEvents
from hflow.planner.period.timed_graph import FORMED, Fields, TimedGraph

LOOK_AHEAD = 2
"""A source whose weights do not change prepares one batch beyond the step that is trained; and batches
of a stale one are formed one step ahead at most."""


def add_rollout(graph: TimedGraph, recurring: SteadyEvents, seconds: Mapping[str, float], step: int) -> None:
    """The vertices of a step before its batch is formed, in the order in which they fire."""
    stream = recurring.stream
    lanes = tuple(dict.fromkeys(recurring.group_of(r) or r for r in stream.replicas))
    for replica in stream.replicas:
        if _is_synced(recurring, replica) and step % recurring.sync_every == 0:
            lane = recurring.group_of(replica) or replica
            if replica in recurring.publishers:
                name = PUBLISH_PREFIX + replica
                graph.add(name, step, seconds.get(name, 0.0), (recurring.publishers[replica],))
            graph.add(replica, step, seconds.get(replica, 0.0), (lane,))
    graph.add(stream.source, step, seconds.get(stream.source, 0.0), lanes or (stream.source,))
    for node in recurring.sample_nodes:
        spent = seconds.get(node.name, 0.0) * recurring.firings(node)
        graph.add(node.name, step, spent, (node.group or node.name,))
    graph.add(FORMED, step, 0.0, is_shown=False)


def link_rollout(graph: TimedGraph, recurring: SteadyEvents, fields: Fields) -> None:
    """What sources, sample nodes and engines wait for; batch nodes are linked already."""
    for replica in recurring.stream.replicas:
        if _is_synced(recurring, replica):
            _link_syncs(graph, recurring, replica)
    for step in range(graph.num_unrolled):
        _link_source(graph, recurring, step)
        _link_samples(graph, recurring, step, fields)


def _is_synced(recurring: SteadyEvents, replica: str) -> bool:
    return bool(recurring.models and recurring.models_of(replica))


def _link_source(graph: TimedGraph, recurring: SteadyEvents, step: int) -> None:
    source = recurring.stream.source
    last = {group: names[-1] for group, names in recurring.orders()}
    for replica in recurring.stream.replicas:
        group = recurring.group_of(replica)
        if group in last:
            graph.link(last[group], source, step, 1, f"turn of group {group}")
    graph.link(source, source, step, 1, f"next batch of {source}")
    if recurring.models and recurring.schedule.settings.max_staleness:
        for writer in recurring.writers_of(recurring.models):
            graph.link(writer, FORMED, step, LOOK_AHEAD, "one batch ahead")
    if not recurring.models:
        for node in recurring.nodes:
            graph.link(node.name, source, step, LOOK_AHEAD, "one batch ahead")


def _link_samples(graph: TimedGraph, recurring: SteadyEvents, step: int, fields: Fields) -> None:
    """From the source through sample and group nodes to the batch, which needs them all."""
    last = dict.fromkeys((recurring.stream.source, *(node.name for node in recurring.sample_nodes)))
    for node in recurring.sample_nodes:
        for before in node.needs or (recurring.stream.source,):
            graph.link(before, node.name, step, 0, fields.get((before, node.name), "data"))
            last.pop(before, None)
    for group, nodes in recurring.stations():
        for before, after in pairwise(nodes):
            graph.link(before, after, step, 0, f"{group} is free")
        graph.link(nodes[-1], nodes[0], step, 1, f"next batch on {group}")
    for name in last:
        graph.link(name, FORMED, step, 0, "")


def _link_syncs(graph: TimedGraph, recurring: SteadyEvents, replica: str) -> None:
    """An engine takes version `step` once it is there, in its turn before the batch that needs it."""
    source, every = recurring.stream.source, recurring.sync_every
    group = recurring.group_of(replica)
    behind = steps_ahead(recurring.schedule.settings.max_staleness, every)
    for step in range(0, graph.num_unrolled, every):
        if replica in recurring.publishers:
            _link_publishing(graph, recurring, replica, step)
        else:
            _link_taking(graph, recurring, replica, step)
        graph.link(replica, source, step + behind, behind, "weights loaded")
        for last, why in _turns_before(recurring, group):
            graph.link(last, replica, step, 1 - behind, why)


def _link_taking(graph: TimedGraph, recurring: SteadyEvents, replica: str, step: int) -> None:
    """Without publishing, an engine with devices of its own takes weights at once; the next writers wait."""
    models = recurring.models_of(replica)
    for writer in recurring.writers_of(models):
        graph.link(writer, replica, step, 1, f"weights of {', '.join(models)}")
        if recurring.group_of(replica) is None:
            graph.link(replica, writer, step, 0, f"{replica} has the weights before they change")


def _link_publishing(graph: TimedGraph, recurring: SteadyEvents, replica: str, step: int) -> None:
    """All writers of a step come before its version is published, and that before those of the next one.

    One version lies ready at most, so that the last one must be loaded before.
    """
    models, every = recurring.models_of(replica), recurring.sync_every
    published, loaded = PUBLISH_PREFIX + replica, f"{replica} has loaded the version before"
    graph.link(published, replica, step, 0, "weights published")
    graph.link(replica, published, step, every, loaded)
    for earlier in recurring.published_before(replica):
        graph.link(
            PUBLISH_PREFIX + earlier, published, step, 0, f"order of group {recurring.publishers[replica]}"
        )
    following, later = recurring.after_writers(replica)
    graph.link(published, following, step - 1 + later, later - 1, "weights published before anything else")
    for writer in recurring.writers_of(models):
        graph.link(writer, published, step, 1, f"weights of {', '.join(models)}")
        graph.link(replica, writer, step, every, loaded)
        for other in recurring.writers_of(models):
            graph.link(writer, other, step, 1, f"weights of {', '.join(models)}")


def _turns_before(recurring: SteadyEvents, group: str | None) -> list[tuple[str, str]]:
    """Which node's end, a step before, makes an engine's devices free, and why.

    Where its source waits for turns elsewhere too, an engine with devices of its own need not wait.
    """
    last = {name: names[-1] for name, names in recurring.orders()}
    turns = [recurring.group_of(name) for name in recurring.stream.replicas]
    if group in last:
        return [(last[group], f"turn of group {group}")]
    if last.keys().isdisjoint(turns):
        return [(recurring.stream.source, f"next batch of {recurring.stream.source}")]
    return []
