"""What generation waits for: turns on devices, new weights, and staleness.

The devices of an engine repeat turns: the engine loads new weights if they are due, then generates one batch;
on a shared group, the batch nodes of the group run next. Synchronous generation does exactly this. In an
asynchronous run, new weights interrupt samples, which continue afterwards. Here the weights are loaded before
the first batch that needs them (a run may begin a part of that batch without them). The engine does the same
work per step, so the pace is the same as long as loading weights is short; tests check for which durations.

A model that runs as samples or groups arrive has its own devices. Its seconds are those of a whole batch. It
starts when the batch is generated, and works on one batch after another.

Weights of an engine on its own devices are first published, on the devices that hold them, right after the
nodes that write them. The next step's training waits for the publishing, but not for the loading. With
staleness 1, the run may be slower than this by up to half of the loading, which then happens in the middle of
a batch.

A source's seconds are those that its engines need for a whole batch, so they generate one batch after
another. A run with samples of two batches in flight is faster if its engines have free slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from hflow.graph.edges import steps_ahead
from hflow.planner.ir import PUBLISH_PREFIX
from hflow.planner.period.steady_events import SteadyEvents
from hflow.planner.period.timed_graph import FORMED, Fields, TimedGraph

LOOK_AHEAD = 2
"""A source whose weights do not change prepares one batch beyond the step that is trained. Batches of an
asynchronous source are formed at most one step ahead."""


def add_generation(graph: TimedGraph, events: SteadyEvents, seconds: Mapping[str, float], step: int) -> None:
    """Add the vertices of a step before its batch is formed, in the order in which they run."""
    stream = events.stream
    lanes_of = {replica: events.groups_of(replica) or (replica,) for replica in stream.replicas}
    lanes = tuple(dict.fromkeys(lane for lanes in lanes_of.values() for lane in lanes))
    for replica in stream.replicas:
        if _is_synced(events, replica) and step % events.sync_every == 0:
            if replica in events.publishers:
                name = PUBLISH_PREFIX + replica
                graph.add(name, step, seconds.get(name, 0.0), events.publishers[replica])
            graph.add(replica, step, seconds.get(replica, 0.0), lanes_of[replica])
    graph.add(stream.source, step, seconds.get(stream.source, 0.0), lanes or (stream.source,))
    for node in events.sample_nodes:
        spent = seconds.get(node.name, 0.0) * events.num_executions(node)
        graph.add(node.name, step, spent, node.groups or (node.name,))
    graph.add(FORMED, step, 0.0, is_shown=False)


def link_generation(graph: TimedGraph, events: SteadyEvents, fields: Fields) -> None:
    """Link sources, sample nodes and engines to what they wait for. Batch nodes are linked already."""
    for replica in events.stream.replicas:
        if _is_synced(events, replica):
            _link_syncs(graph, events, replica)
    for step in range(graph.num_unrolled):
        _link_source(graph, events, step)
        _link_sample_nodes(graph, events, step, fields)


def _is_synced(events: SteadyEvents, replica: str) -> bool:
    return bool(events.models and events.models_of(replica))


def _link_source(graph: TimedGraph, events: SteadyEvents, step: int) -> None:
    source = events.stream.source
    for replica in events.stream.replicas:
        for last, why in events.turns_of(replica):
            graph.link(last, source, step, 1, why)
    graph.link(source, source, step, 1, f"next batch of {source}")
    if events.models and events.schedule.settings.max_staleness:
        for writer in events.writers_of(events.models):
            graph.link(writer, FORMED, step, LOOK_AHEAD, "one batch ahead")
    if not events.models:
        for node in events.nodes:
            graph.link(node.name, source, step, LOOK_AHEAD, "one batch ahead")


def _link_sample_nodes(graph: TimedGraph, events: SteadyEvents, step: int, fields: Fields) -> None:
    """Link the source through sample and group nodes to the batch, which needs all of them."""
    last = dict.fromkeys((events.stream.source, *(node.name for node in events.sample_nodes)))
    for node in events.sample_nodes:
        for before in node.needs or (events.stream.source,):
            graph.link(before, node.name, step, 0, fields.get((before, node.name), "data"))
            last.pop(before, None)
    for queue, nodes in events.streaming_queues():
        for before, after in pairwise(nodes):
            graph.link(before, after, step, 0, f"{queue} is free")
        graph.link(nodes[-1], nodes[0], step, 1, f"next batch on {queue}")
    for name in last:
        graph.link(name, FORMED, step, 0, "")


def _link_syncs(graph: TimedGraph, events: SteadyEvents, replica: str) -> None:
    """Link the loading of version `step`: once it exists, before the batch that needs it."""
    source, every = events.stream.source, events.sync_every
    num_ahead = steps_ahead(events.schedule.settings.max_staleness, every)
    for step in range(0, graph.num_unrolled, every):
        if replica in events.publishers:
            _link_publishing(graph, events, replica, step)
        else:
            _link_loading(graph, events, replica, step)
        graph.link(replica, source, step + num_ahead, num_ahead, "weights loaded")
        for last, why in _turns_before(events, replica):
            graph.link(last, replica, step, 1 - num_ahead, why)


def _link_loading(graph: TimedGraph, events: SteadyEvents, replica: str, step: int) -> None:
    """Without publishing, an engine with devices of its own takes weights at once; the next writers wait."""
    models = events.models_of(replica)
    for writer in events.writers_of(models):
        graph.link(writer, replica, step, 1, f"weights of {', '.join(models)}")
        if not events.groups_of(replica):
            graph.link(replica, writer, step, 0, f"{replica} has the weights before they change")


def _link_publishing(graph: TimedGraph, events: SteadyEvents, replica: str, step: int) -> None:
    """Link publishing after all writers of a step, and before the writers of the next one.

    At most one published version is pending per engine, so the previous one must be loaded first.
    """
    models, every = events.models_of(replica), events.sync_every
    published, loaded = PUBLISH_PREFIX + replica, f"{replica} has loaded the version before"
    graph.link(published, replica, step, 0, "weights published")
    graph.link(replica, published, step, every, loaded)
    for earlier in events.published_before(replica):
        order = f"order of group {events.publishers[replica][0]}"
        graph.link(PUBLISH_PREFIX + earlier, published, step, 0, order)
    for following, later in events.after_writers(replica):
        why = "weights published before anything else"
        graph.link(published, following, step - 1 + later, later - 1, why)
    for writer in events.writers_of(models):
        graph.link(writer, published, step, 1, f"weights of {', '.join(models)}")
        graph.link(replica, writer, step, every, loaded)
        for other in events.writers_of(models):
            graph.link(writer, other, step, 1, f"weights of {', '.join(models)}")


def _turns_before(events: SteadyEvents, replica: str) -> list[tuple[str, str]]:
    """Return the nodes of the previous step whose end frees an engine's devices, and the reasons.

    An engine on its own devices does not wait if its source already waits for turns on other groups.
    """
    if turns := events.turns_of(replica):
        return turns
    if not any(events.turns_of(name) for name in events.stream.replicas):
        return [(events.stream.source, f"next batch of {events.stream.source}")]
    return []
