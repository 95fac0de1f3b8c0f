"""The section on weight routes: how new weights reach the other copies of a model, and the bytes."""

from __future__ import annotations

from rich.text import Text

from hflow.base.text import format_ranges_briefly
from hflow.planner.plan.rows import Plan, Replica, WeightRoute
from hflow.report.content import ROUTE_SIZE_COLUMNS, route_sizes
from hflow.report.formatting import format_rank_order
from hflow.report.text.section import Section, add_row, dim, lines, number, table, text

NOTE = (
    "How new weights reach another copy of the model. shared: both use the same memory; gather: assembled "
    "bucket by bucket on the same devices; pull: copied out slice by slice, then fetched by other devices or "
    "processes, by a transport (models.NAME.gen.transport). "
    "The bytes moved are the fewest possible: what a device already holds stays in place."
)


def weights_section(plan: Plan, width: int) -> Section:
    """Return a row for each route."""
    if not plan.weights:
        return Section("Weights", absent="no model that changes has a second copy")
    is_sized = any(route.rows or route.moved_bytes or route.held_bytes for route in plan.weights)
    columns = [text("from → to"), text("how")]
    if is_sized:
        columns += map(number, ROUTE_SIZE_COLUMNS)
    shown = table(*columns)
    for route in plan.weights:
        ends = lines((_end(plan.replica(route.src)), Text("→ ") + _end(plan.replica(route.dst))))
        add_row(shown, ends, _way(route), *(route_sizes(route) if is_sized else ()))
    return Section("Weights", NOTE, (shown,))


def _way(route: WeightRoute) -> Text:
    notes = [dim(f"by {route.transport}: {route.why}")] if route.transport else []
    if route.near:
        notes.append(dim(f"what a device holds by {route.near}"))
    if route.delta:
        notes.append(dim("only changes"))
    if route.saved_bytes:
        notes.append(dim(format_rank_order(route.moved_bytes, route.saved_bytes)))
    return lines((Text(route.how), *notes))


def _end(replica: Replica) -> Text:
    return Text.assemble(
        (replica.name, "bold"), f" {replica.layout} on {format_ranges_briefly(replica.workers)}"
    )
