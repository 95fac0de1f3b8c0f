"""A schedule as a timed event graph: one vertex for each event that takes time, in each unrolled step.

Every arc is something that `RunState` enforces, so the steady state of the graph is that of a run. Within a
step, a node waits for its batch, its needs and its group's order. Across steps, it waits for the weights that
it reads and for the previous step on its group. `generation_edges` adds generation and new weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from hflow.planner.ir import ScheduledNode
from hflow.planner.period.cycle_ratio import Arc
from hflow.planner.period.steady_events import SteadyEvents

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
    """Return why a node needs another one in the same step."""
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
