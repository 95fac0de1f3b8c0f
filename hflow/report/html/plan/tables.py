"""The tables of the page: those that all reports share, the rows of weight routes, and routing."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.planner.plan.rows import Plan
from hflow.report.html.plan.details import Listing, route_listing
from hflow.report.tables import (
    TableView,
    data_table,
    placements_table,
    replicas_table,
    times_table,
    weights_table,
)


@dataclass(frozen=True)
class RoutingTable:
    """The routing table, in the order of the plan."""

    keys: tuple[str, ...]
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Tables:
    """All tables."""

    views: tuple[TableView, ...]
    slices: tuple[Listing, ...]
    routing: RoutingTable


def tables(plan: Plan) -> Tables:
    """Return the tables of a plan."""
    views = (
        placements_table(plan),
        replicas_table(plan),
        times_table(plan),
        data_table(plan, assumptions="above"),
        weights_table(plan),
    )
    return Tables(
        views=tuple(view for view in views if view.rows),
        slices=tuple(route_listing(plan, route) for route in plan.weights if route.rows),
        routing=RoutingTable(tuple(r.key for r in plan.routing), tuple(r.worker for r in plan.routing)),
    )
