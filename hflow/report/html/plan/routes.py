"""Routes between devices: which devices send what to which, for data edges and for weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hflow.base.text import find_runs, format_bytes, pluralize
from hflow.planner.plan.forecast import EdgeTraffic
from hflow.planner.plan.rows import Plan, WeightRoute
from hflow.report.tables import is_sized

MOST_FLOWS = 2048
"""Number of flows per route that the page shows, largest first."""


@dataclass(frozen=True)
class RouteView:
    """One route of data or weights."""

    id: str
    title: str
    kind: str
    """`data` or `weights`."""
    note: str
    flows: tuple[tuple[int, int], ...]
    """(holders, receivers) as indices of sets; a receiver takes from a holder."""
    is_near: bool
    """Whether a receiver prefers senders on its own machine."""


class Sets:
    """Sets of devices by index."""

    def __init__(self) -> None:
        self._index: dict[tuple[int, ...], int] = {}

    def add(self, devices: Iterable[int]) -> int:
        """Return the index of a set, adding it if it is new."""
        return self._index.setdefault(tuple(sorted(set(devices))), len(self._index))

    def runs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return all sets, each as runs of consecutive devices `[first, last]`."""
        return tuple(tuple(find_runs(devices)) for devices in self._index)


def route_views(plan: Plan, consumers: Iterable[str], sets: Sets) -> tuple[RouteView, ...]:
    """Return the routes of the inputs of batch nodes, then every weight route; `sets` collects devices."""
    traffic = {row.consumer: row for row in plan.forecast.traffic}
    data = [_data(traffic[node], sets) for node in consumers if node in traffic]
    return (*data, *(_weights(plan, route, sets) for route in plan.weights))


def weights_id(route: WeightRoute) -> str:
    """Return the id of a weight route on the page."""
    return f"weights {route.src} {route.dst}"


def data_id(consumer: str) -> str:
    """Return the id of a batch node's inputs on the page."""
    return f"data {consumer}"


def _data(traffic: EdgeTraffic, sets: Sets) -> RouteView:
    flows = {
        (sets.add((step.root,) if step.kind != "gather" else step.sources), sets.add(step.destinations))
        for step in traffic.steps
    }
    shown = len(traffic.steps)
    part = (
        f"; the {shown} largest of {pluralize(traffic.num_steps, 'step')}"
        if traffic.num_steps > shown
        else ""
    )
    note = f"{format_bytes(traffic.num_bytes)} move, {format_bytes(traffic.local_bytes)} stay{part}"
    return RouteView(data_id(traffic.consumer), traffic.consumer, "data", note, tuple(sorted(flows)), False)


def _weights(plan: Plan, route: WeightRoute, sets: Sets) -> RouteView:
    members = [sets.add(workers) for workers in route.worker_sets]
    flows = list(dict.fromkeys((members[row.holders], members[row.receivers]) for row in route.rows))
    if not route.rows:
        flows = [(sets.add(plan.replica(route.src).workers), sets.add(plan.replica(route.dst).workers))]
    note = (
        f"{format_bytes(route.moved_bytes)} move, {format_bytes(route.held_bytes)} are in place already"
        if is_sized(route)
        else "sizes unknown"
    )
    return RouteView(
        weights_id(route), f"{route.src} → {route.dst}", "weights", note, tuple(flows[:MOST_FLOWS]), True
    )
