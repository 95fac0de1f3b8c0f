"""A schedule as a timed event graph: one vertex for each thing that takes time, at each step unrolled.

Every arc is something that `RunState` enforces, so that the graph's steady state is that of a run:
within a step a node waits for its batch, its needs and its group's order; across steps for the weights
that it reads and for the step before on its group; and `rollout_arcs` for generation and new weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from hflow.planner.ir import ScheduledNode
from hflow.planner.period.cycle_ratio import Arc
from hflow.planner.period.steady_events import SteadyEvents

FORMED = ""
"""The moment when a step's batch is formed."""

Fields = Mapping[tuple[str, str], str]
"""(producer, consumer) -> the fields that go from one to the other, in words."""


@dataclass(frozen=True)
class Vertex:
    """Something that fires once in every round of the unrolled steps."""

    name: str
    """A node, a source, a replica that takes new weights, their publishing, or `FORMED`."""
    step: int
    seconds: float
    lanes: tuple[str, ...]
    """Device groups, or engines with devices of their own, that it keeps busy."""
    is_shown: bool
    """Whether it happens: a node that is passed over at this step, or `FORMED`, is not shown."""


class TimedGraph:
    """Vertices and arcs, built up step by step.

    Attributes:
        num_unrolled: steps unrolled; an arc that leads beyond them comes in again at the front.
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
        """Let `dst` of a step wait for `src` of `lag` steps before; the first reason given stays."""
        tail = self._index[src, (step - lag) % self.num_unrolled]
        head = self._index[dst, step % self.num_unrolled]
        arc = Arc(tail, head, self.vertices[tail].seconds, lag, why)
        self._arcs.setdefault((tail, head, lag), arc)


def link_batch_nodes(graph: TimedGraph, recurring: SteadyEvents, fields: Fields) -> None:
    """What batch nodes wait for: needs, weights, their group's order, and the batch."""
    for step in range(graph.num_unrolled):
        for node in recurring.nodes:
            # A writer that is passed over waits as if it fired: its models' version advances then.
            if recurring.fires(node, step) or node.writes:
                _link_needs(graph, recurring, node, step, fields)
                _link_weights(graph, recurring, node, step)
        for group, names in recurring.orders():
            for before, after in pairwise(names):
                graph.link(before, after, step, 0, f"order of group {group}")
            again = f"next step on group {group}" if group != names[0] else "next step"
            graph.link(names[-1], names[0], step, 1, again)
        for node in recurring.nodes:
            graph.link(FORMED, node.name, step, 0, "batch formed")


def _link_needs(
    graph: TimedGraph, recurring: SteadyEvents, node: ScheduledNode, step: int, fields: Fields
) -> None:
    for before in recurring.nodes:
        if before.name in node.needs and recurring.fires(before, step):
            graph.link(before.name, node.name, step, 0, _words(before, node, fields))


def _words(before: ScheduledNode, node: ScheduledNode, fields: Fields) -> str:
    """Why a node needs another one in the same step."""
    overwritten = [model for model in node.writes if model in before.reads]
    if (before.name, node.name) in fields:
        return fields[before.name, node.name]
    if overwritten:
        return f"{', '.join(overwritten)} is read before it changes"
    return f"weights of {', '.join(before.writes)}" if before.writes else "data"


def _link_weights(graph: TimedGraph, recurring: SteadyEvents, node: ScheduledNode, step: int) -> None:
    """A node of step k uses weights exactly as step k - 1 left them."""
    for model in recurring.trained((*node.reads, *node.writes)):
        for writer in recurring.writers[model]:
            graph.link(writer, node.name, step, 1, f"weights of {model}")
