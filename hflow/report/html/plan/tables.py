"""The plan's rows as tables: replicas, node times, redistribution, weight routes, routing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hflow.base.text import TIMES, format_bytes, format_seconds, format_setting
from hflow.planner.plan.rows import Plan, WeightRoute
from hflow.report.content import REPLICA_COLUMNS, ROUTE_SIZE_COLUMNS, TableView, replica_row, route_sizes
from hflow.report.formatting import format_rank_order
from hflow.report.html.plan.details import Listing, TimeShare, route_listing, time_parts, transport_text
from hflow.report.text.plan.weights import NOTE


@dataclass(frozen=True)
class TimeRow:
    """One node's time."""

    node: str
    seconds: str
    limit: str
    parts: tuple[TimeShare, ...]


@dataclass(frozen=True)
class RoutingTable:
    """The routing table, in the order of the plan."""

    keys: tuple[str, ...]
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Tables:
    """All tables."""

    placements: TableView | None
    """What the search for a placement compared."""
    replicas: TableView
    times: tuple[TimeRow, ...]
    moves: TableView | None
    weights: TableView | None
    slices: tuple[Listing, ...]
    routing: RoutingTable


def tables(plan: Plan) -> Tables:
    """Return the tables of a plan."""
    return Tables(
        placements=_placements(plan),
        replicas=_replicas(plan),
        times=tuple(_times(plan)),
        moves=_moves(plan),
        weights=_weights(plan),
        slices=tuple(route_listing(plan, route) for route in plan.weights if route.rows),
        routing=RoutingTable(tuple(r.key for r in plan.routing), tuple(r.worker for r in plan.routing)),
    )


def _placements(plan: Plan) -> TableView | None:
    """Return the candidates of the search, the chosen one first."""
    candidates = plan.forecast.candidates
    rows = tuple(
        (
            format_seconds(row.seconds),
            format_bytes(row.memory_bytes),
            row.why,
            row.placement,
            " ".join(format_setting(key, value) for key, value in row.settings),
        )
        for row in candidates
    )
    columns = ("step", "fullest device", "why", "placement", "settings")
    return TableView("Placements that were compared", columns, rows, right=(0, 1)) if rows else None


def _replicas(plan: Plan) -> TableView:
    rows = tuple(replica_row(plan, replica) for replica in plan.replicas)
    return TableView("Replicas", REPLICA_COLUMNS, rows, right=(1,))


def _times(plan: Plan) -> Iterator[TimeRow]:
    rows = plan.forecast.times
    for row in sorted(rows, key=lambda row: -row.seconds):
        yield TimeRow(row.node, format_seconds(row.seconds), row.limit, time_parts(row))


def _moves(plan: Plan) -> TableView | None:
    if not plan.forecast.traffic:
        return None
    return TableView(
        "Redistribution: bytes that a step's inputs move",
        ("node", "moves", "lower bound", "across machines", "stays", "heaviest rank", "steps"),
        tuple(
            (
                row.consumer,
                format_bytes(row.num_bytes),
                format_bytes(row.lower_bound),
                format_bytes(row.num_node_bytes),
                format_bytes(row.local_bytes),
                f"{row.imbalance:.2f} {TIMES}",
                f"{row.num_steps:,}",
            )
            for row in plan.forecast.traffic
        ),
        right=(1, 2, 3, 4, 5, 6),
    )


def _how(route: WeightRoute) -> str:
    if not route.saved_bytes:
        return route.how
    return f"{route.how}; {format_rank_order(route.moved_bytes, route.saved_bytes)}"


def _weights(plan: Plan) -> TableView | None:
    if not plan.weights:
        return None
    return TableView(
        "Weight routes: from training to generation",
        ("from", "to", "how", "transport", *ROUTE_SIZE_COLUMNS),
        tuple(
            (route.src, route.dst, _how(route), transport_text(route), *route_sizes(route))
            for route in plan.weights
        ),
        right=(4, 5, 6, 7),
        note=NOTE,
    )
