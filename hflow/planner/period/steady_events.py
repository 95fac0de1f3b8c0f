"""What of a schedule comes back in the steady state: which nodes fire when, engines, writers.

Side streams are left out: how long an evaluation takes is decided by its dataset, which the planner
does not read. So is what fires once in a run at most, as a save at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from hflow.graph.ir import Level
from hflow.planner.ir import Schedule, ScheduledNode

MOST_STEPS = 12
"""Steps unrolled, at most, for nodes that do not fire in every step. Rarer ones count with their mean."""


class SteadyEvents:
    """The trained stream of a schedule, as it goes on and on.

    Attributes:
        nodes: batch nodes.
        sample_nodes: sample and group nodes.
        writers: model -> batch nodes that change it.
        models: models that change among those that the source reads.
        sync_every: steps between two transfers of weights to engines; 1 where there are none.
        publishers: engine with devices of its own -> the group that publishes its weights.
        num_unrolled: steps after which everything is as before.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.stream = schedule.streams[0]
        mine = [node for node in schedule.nodes if node.stream == self.stream.name]
        self.nodes = tuple(node for node in mine if node.level is Level.BATCH)
        self.sample_nodes = tuple(node for node in mine if node.level is not Level.BATCH)
        self.writers: dict[str, tuple[str, ...]] = {}
        for node in self.nodes:
            for model in node.writes:
                self.writers[model] = (*self.writers.get(model, ()), node.name)
        self.models = self.trained(self.stream.models)
        self.sync_every = schedule.settings.sync_every if self.models else 1
        self.publishers = dict(schedule.publishers)
        self.num_unrolled = self._unrolled_steps()

    def trained(self, models: Iterable[str]) -> tuple[str, ...]:
        """Those models that change in the run."""
        return tuple(model for model in models if model in self.writers)

    def fires(self, node: ScheduledNode, step: int) -> bool:
        """Whether a batch node fires at a step; one that counts with its mean fires at each."""
        if not self._comes_back(node):
            return False
        return self.num_unrolled % node.every > 0 or (step - node.after) % node.every == 0

    def share(self, node: ScheduledNode) -> float:
        """The part of a node's seconds that one firing counts."""
        return 1 / node.every if self.num_unrolled % node.every else 1.0

    def group_of(self, replica: str) -> str | None:
        """The group on whose devices an engine takes turns with batch nodes; None: it has its own."""
        return next((group for group, names in self.schedule.shared if replica in names), None)

    def models_of(self, replica: str) -> tuple[str, ...]:
        """Models whose new weights an engine is given: those of every stream that uses it."""
        read = [model for s in self.schedule.streams if replica in s.replicas for model in s.models]
        return self.trained(dict.fromkeys(read))

    def writers_of(self, models: Iterable[str]) -> tuple[str, ...]:
        """Batch nodes that change any of these models."""
        return tuple(dict.fromkeys(name for model in self.trained(models) for name in self.writers[model]))

    def orders(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Group -> its batch nodes in cyclic order; a node without a group is one of its own."""
        mine = {node.name for node in self.nodes}
        placed = [(g, tuple(n for n in names if n in mine)) for g, names in self.schedule.orders]
        alone = mine.difference(*(names for _, names in placed))
        own = [(node.name, (node.name,)) for node in self.nodes if node.name in alone]
        return tuple((group, names) for group, names in (*placed, *own) if names)

    def firings(self, node: ScheduledNode) -> int:
        """How often a node's seconds count in a step: of a model that runs on what arrives, for each."""
        if node.level is Level.BATCH or node.group is None:
            return 1
        return (self.stream.batch or 1) * (self.stream.group_size if node.level is Level.SAMPLE else 1)

    def stations(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Device group -> the nodes that run there as samples or groups arrive."""
        groups = dict.fromkeys(node.group for node in self.sample_nodes if node.group is not None)
        return tuple((g, tuple(n.name for n in self.sample_nodes if n.group == g)) for g in groups)

    def after_writers(self, replica: str) -> tuple[str, int]:
        """What the group that publishes an engine's weights does next, and how many steps later."""
        order = dict(self.orders())[self.publishers[replica]]
        written = self.writers_of(self.models_of(replica))
        last = max(place for place, name in enumerate(order) if name in written)
        return (order[last + 1], 0) if last + 1 < len(order) else (order[0], 1)

    def published_before(self, replica: str) -> tuple[str, ...]:
        """The engines of the trained stream whose weights the same group publishes before an engine's."""
        before = self.stream.replicas[: self.stream.replicas.index(replica)]
        return tuple(name for name in before if self.publishers.get(name) == self.publishers[replica])

    def lanes(self) -> tuple[str, ...]:
        """Device groups with batch nodes, engines with devices of their own, and models that have them."""
        own = (replica for replica in self.stream.replicas if self.group_of(replica) is None)
        turns = [group for group, _ in self.schedule.orders]
        return tuple(dict.fromkeys((*turns, *own, *(group for group, _ in self.stations()))))

    def _comes_back(self, node: ScheduledNode) -> bool:
        second = node.after if node.every == 1 else node.after + node.every
        return second < self.schedule.num_steps

    def _unrolled_steps(self) -> int:
        steps = self.sync_every
        for every in sorted({node.every for node in self.nodes if self._comes_back(node)}):
            together = math.lcm(steps, every)
            steps = together if together <= max(steps, MOST_STEPS) else steps
        return steps
