"""A schedule as a timed event graph: one vertex for each event that takes time, in each unrolled step.

Every arc is something that `RunState` enforces, so the steady state of the graph is that of a run. Within a
step, a node waits for its batch, its needs and its group's order. Across steps, it waits for the weights that
it reads and for the previous step on its group. Generation waits for turns on devices, new weights, and
staleness.

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

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from hflow.graph.ir import Level
from hflow.planner.forecast.period.cycle_ratio import Arc
from hflow.planner.plan.rows import PUBLISH_PREFIX, Schedule, ScheduledNode
from hflow.planner.plan.schedule import shared_groups, streaming_queues

FORMED = ""
"""The vertex at which a step's batch is formed."""

Fields = Mapping[tuple[str, str], str]
"""(producer, consumer) -> the fields between them, in words."""


@dataclass(frozen=True)
class Vertex:
    """An event that happens once in the unrolled steps."""

    name: str
    """A node, a source, a replica that loads new weights, their publishing, or `FORMED`."""
    step: int
    seconds: float
    lanes: tuple[str, ...]
    """Device groups, or engines on their own devices, that it keeps busy."""
    is_shown: bool
    """Whether reports show it: not `FORMED`, nor a node that is skipped at this step."""


class TimedGraph:
    """Vertices and arcs, added step by step.

    Attributes:
        num_unrolled: unrolled steps; an arc beyond the last one leads to the first.
    """

    def __init__(self, num_unrolled: int) -> None:
        self.num_unrolled = num_unrolled
        self.vertices: list[Vertex] = []
        self._index: dict[tuple[str, int], int] = {}
        self._arcs: dict[tuple[int, int, int], Arc] = {}

    @property
    def arcs(self) -> list[Arc]:
        """All arcs, in the order of their tails."""
        return sorted(self._arcs.values(), key=lambda arc: arc.src)

    def add(
        self, name: str, step: int, seconds: float, lanes: tuple[str, ...] = (), *, is_shown: bool = True
    ) -> None:
        """Add a vertex."""
        self._index[name, step] = len(self.vertices)
        self.vertices.append(Vertex(name, step, seconds, lanes, is_shown))

    def link(self, src: str, dst: str, step: int, lag: int, why: str) -> None:
        """Let `dst` of a step wait for `src` of `lag` steps before. The first reason is kept."""
        tail = self._index[src, (step - lag) % self.num_unrolled]
        head = self._index[dst, step % self.num_unrolled]
        arc = Arc(tail, head, self.vertices[tail].seconds, lag, why)
        self._arcs.setdefault((tail, head, lag), arc)


def link_batch_nodes(graph: TimedGraph, events: SteadyEvents, fields: Fields) -> None:
    """Link batch nodes to what they wait for: needs, weights, their group's order, and the batch."""
    for step in range(graph.num_unrolled):
        for node in events.nodes:
            # A writer that is skipped waits as if it ran, as the version of its models advances then.
            if events.fires(node, step) or node.writes:
                _link_needs(graph, events, node, step, fields)
                _link_weights(graph, events, node, step)
        for group, names in events.orders():
            for before, after in pairwise(names):
                graph.link(before, after, step, 0, f"order of group {group}")
            again = f"next step on group {group}" if group != names[0] else "next step"
            graph.link(names[-1], names[0], step, 1, again)
        for node in events.nodes:
            graph.link(FORMED, node.name, step, 0, "batch formed")


def _link_needs(
    graph: TimedGraph, events: SteadyEvents, node: ScheduledNode, step: int, fields: Fields
) -> None:
    for before in events.nodes:
        if before.name in node.needs and events.fires(before, step):
            graph.link(before.name, node.name, step, 0, _reason(before, node, fields))


def _reason(before: ScheduledNode, node: ScheduledNode, fields: Fields) -> str:
    """Return the reason why a node needs another one in the same step."""
    overwritten = [model for model in node.writes if model in before.reads]
    if (before.name, node.name) in fields:
        return fields[before.name, node.name]
    if overwritten:
        return f"{', '.join(overwritten)} is read before it changes"
    return f"weights of {', '.join(before.writes)}" if before.writes else "data"


def _link_weights(graph: TimedGraph, events: SteadyEvents, node: ScheduledNode, step: int) -> None:
    """Link a node of step k to the writers of step k - 1, whose weights it uses."""
    for model in events.trained((*node.reads, *node.writes)):
        for writer in events.writers[model]:
            graph.link(writer, node.name, step, 1, f"weights of {model}")


MAX_UNROLLED_STEPS = 12
"""Maximum number of unrolled steps. Nodes that run more rarely count with their mean."""


class SteadyEvents:
    """The events that repeat on the trained stream of a schedule.

    Other streams than the trained one are left out, as their seconds depend on datasets that the planner does
    not read. So is what runs at most once, such as a save at the end.

    Attributes:
        nodes: batch nodes.
        sample_nodes: sample and group nodes.
        writers: model -> batch nodes that change it.
        models: models that the source reads and that change.
        sync_every: steps between two transfers of weights to engines; 1 if there are none.
        publishers: engine on its own devices -> the groups that publish its weights.
        num_unrolled: steps after which the schedule repeats.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.stream = schedule.streams[0]
        nodes = [node for node in schedule.nodes if node.stream == self.stream.name]
        self.nodes = tuple(node for node in nodes if node.level is Level.BATCH)
        self.sample_nodes = tuple(node for node in nodes if node.level is not Level.BATCH)
        self.writers: dict[str, tuple[str, ...]] = {}
        for node in self.nodes:
            for model in node.writes:
                self.writers[model] = (*self.writers.get(model, ()), node.name)
        self.models = self.trained(self.stream.models)
        self.sync_every = schedule.settings.sync_every if self.models else 1
        self.publishers = dict(schedule.publishers)
        self.num_unrolled = self._unrolled_steps()

    def trained(self, models: Iterable[str]) -> tuple[str, ...]:
        """Return those models that change in the run."""
        return tuple(model for model in models if model in self.writers)

    def fires(self, node: ScheduledNode, step: int) -> bool:
        """Return whether a batch node runs at a step. One that counts with its mean runs at each."""
        if not self.repeats(node):
            return False
        return self.num_unrolled % node.every > 0 or (step - node.after) % node.every == 0

    def share(self, node: ScheduledNode) -> float:
        """Return the fraction of a node's seconds that counts per execution."""
        return 1 / node.every if self.num_unrolled % node.every else 1.0

    def groups_of(self, replica: str) -> tuple[str, ...]:
        """Return the groups of an engine that shares devices with batch nodes, or none if it has its own."""
        return shared_groups(self.schedule, replica)

    def turns_of(self, replica: str) -> list[tuple[str, str]]:
        """Return the last nodes on the groups that an engine shares with batch nodes, and why it waits."""
        orders, groups = dict(self.orders()), self.groups_of(replica)
        return [(orders[group][-1], f"turn of group {group}") for group in groups if group in orders]

    def models_of(self, replica: str) -> tuple[str, ...]:
        """Return the models whose new weights an engine loads: those of every stream that uses it."""
        read = [model for s in self.schedule.streams if replica in s.replicas for model in s.models]
        return self.trained(dict.fromkeys(read))

    def writers_of(self, models: Iterable[str]) -> tuple[str, ...]:
        """Return the batch nodes that change any of these models."""
        return tuple(dict.fromkeys(name for model in self.trained(models) for name in self.writers[model]))

    def orders(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return the batch nodes of each group in cyclic order. A node without a group is its own group."""
        nodes = {node.name for node in self.nodes}
        placed = [(g, tuple(n for n in names if n in nodes)) for g, names in self.schedule.orders]
        alone = nodes.difference(*(names for _, names in placed))
        ungrouped = [(node.name, (node.name,)) for node in self.nodes if node.name in alone]
        return tuple((group, names) for group, names in (*placed, *ungrouped) if names)

    def num_executions(self, node: ScheduledNode) -> int:
        """Return the factor of a node's seconds in a step: per sample or group for a streaming model."""
        if node.level is Level.BATCH or not node.groups:
            return 1
        return (self.stream.batch or 1) * (self.stream.group_size if node.level is Level.SAMPLE else 1)

    def streaming_queues(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return the nodes that run on devices as samples or groups arrive, by their queue."""
        queues = streaming_queues(replace(self.schedule, nodes=self.sample_nodes))
        return tuple((name, tuple(node.name for node in nodes)) for name, nodes in queues)

    def after_writers(self, replica: str) -> Iterator[tuple[str, int]]:
        """Yield the next node of each group that publishes an engine's weights, and its lag in steps."""
        orders, written = dict(self.orders()), self.writers_of(self.models_of(replica))
        for group in self.publishers[replica]:
            order = orders.get(group, ())
            places = [place for place, name in enumerate(order) if name in written]
            if places:
                last = places[-1]
                yield (order[last + 1], 0) if last + 1 < len(order) else (order[0], 1)

    def published_before(self, replica: str) -> tuple[str, ...]:
        """Return the engines whose weights the same groups publish before those of an engine."""
        before = self.stream.replicas[: self.stream.replicas.index(replica)]
        own = set(self.publishers[replica])
        return tuple(name for name in before if not own.isdisjoint(self.publishers.get(name, ())))

    def lanes(self) -> tuple[str, ...]:
        """Return groups with batch nodes, and engines and streaming models on their own devices."""
        separate_engines = (replica for replica in self.stream.replicas if not self.groups_of(replica))
        groups = [group for group, _ in (*self.schedule.orders, *self.schedule.shared)]
        streaming = (group for node in self.sample_nodes for group in node.groups)
        return tuple(dict.fromkeys((*groups, *separate_engines, *streaming)))

    def repeats(self, node: ScheduledNode) -> bool:
        """Return whether a batch node runs more than once in the run."""
        second = node.after if node.every == 1 else node.after + node.every
        return second < self.schedule.num_steps

    def _unrolled_steps(self) -> int:
        steps = self.sync_every
        for every in sorted({node.every for node in self.nodes if self.repeats(node)}):
            together = math.lcm(steps, every)
            steps = together if together <= max(steps, MAX_UNROLLED_STEPS) else steps
        return steps


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
    num_ahead = events.schedule.settings.steps_ahead
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
