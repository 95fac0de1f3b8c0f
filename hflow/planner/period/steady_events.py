"""The events of a schedule that repeat in the steady state: nodes, engines, writers of weights.

Other streams than the trained one are left out, as their seconds depend on datasets that the planner does not
read. So is what runs at most once, such as a save at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hflow.graph.ir import Level
from hflow.planner.ir import Schedule, ScheduledNode
from hflow.planner.schedule import shared_groups, streaming_queues

MAX_UNROLLED_STEPS = 12
"""Maximum number of unrolled steps. Nodes that run more rarely count with their mean."""


class SteadyEvents:
    """What repeats on the trained stream of a schedule.

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
        """Return how often a node's seconds count in a step: per sample or group for a streaming model."""
        if node.level is Level.BATCH or not node.groups:
            return 1
        return (self.stream.batch or 1) * (self.stream.group_size if node.level is Level.SAMPLE else 1)

    def streaming_queues(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return the nodes that run on devices as samples or groups arrive, by their queue."""
        queues = streaming_queues(replace(self.schedule, nodes=self.sample_nodes))
        return tuple((name, tuple(node.name for node in nodes)) for name, nodes in queues)

    def after_writers(self, replica: str) -> Iterator[tuple[str, int]]:
        """Yield what each group that publishes an engine's weights runs next, and how many steps later."""
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
