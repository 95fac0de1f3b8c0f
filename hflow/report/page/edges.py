"""The edges that the page draws: edges of the graph, and the node orders of device groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hflow.graph.edges import max_lag
from hflow.graph.ir import Edge, EdgeKind
from hflow.planner.plan.rows import SAVE_PREFIX, Plan
from hflow.planner.plan.schedule import order_edges

SAMPLES = ("samples",)
"""Label of a data edge that names no fields."""


@dataclass(frozen=True)
class Arrow:
    """One edge to draw."""

    id: str
    kind: EdgeKind
    src: str
    dst: str
    label: tuple[str, ...]
    """What it carries, one line each: fields, or the model whose weights."""
    lag: int
    """Number of steps that it crosses."""
    is_at_most: bool
    """Whether it may cross fewer."""
    key: str
    """Arrows with the same key share one path back (weights of one writer for all its readers)."""

    @property
    def lag_text(self) -> str:
        """Return `lag 1` or `lag ≤ 2`; empty within a step."""
        return f"lag {'≤ ' if self.is_at_most else ''}{self.lag}" if self.lag else ""

    @property
    def text(self) -> str:
        """Return label and lag in one line."""
        return ", ".join((*self.label, self.lag_text) if self.lag else self.label)


def arrows(plan: Plan) -> tuple[Arrow, ...]:
    """Return all edges, in the plan's order."""
    made = [*_of_graph(plan), *_orders(plan)]
    return tuple(replace(arrow, id=f"e{i}") for i, arrow in enumerate(made))


def _of_graph(plan: Plan) -> Iterator[Arrow]:
    schedule = plan.schedule
    for edge in plan.graph.edges:
        lag = max_lag(edge, schedule.settings.max_staleness, schedule.settings.sync_every)
        key = f"{edge.kind} {edge.src} {edge.model or edge.fields}"
        yield Arrow("", edge.kind, edge.src, edge.dst, _label(edge), lag, edge.at_most, key)


def _label(edge: Edge) -> tuple[str, ...]:
    if edge.kind is EdgeKind.DATA:
        return edge.fields or SAMPLES
    return (f"weights of {edge.model}" if edge.kind is EdgeKind.WEIGHTS else f"before {edge.model} changes",)


def _orders(plan: Plan) -> Iterator[Arrow]:
    """Yield the cyclic orders of nodes; saving is drawn as part of its writer."""
    orders = []
    for group, names in plan.schedule.orders:
        turns = tuple(name for name in names if not name.startswith(SAVE_PREFIX))
        orders += [(group, turns)] if turns else []
    for edge in order_edges(orders):
        label = (f"order of group {' and '.join(edge.groups)}",)
        key = f"order {edge.src} {edge.dst}"
        yield Arrow("", EdgeKind.ORDER, edge.src, edge.dst, label, edge.lag, False, key)
