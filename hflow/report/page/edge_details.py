"""The details of an edge: its meaning, the bytes it moves, and the steps that move them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hflow.graph.ir import EdgeKind
from hflow.planner.forecast import EdgeTraffic, StepTraffic
from hflow.planner.ir import Plan, RouteRow, WeightRoute
from hflow.report.formatting import DASH, TIMES, bytes_text, count_text, plural, range_text
from hflow.report.page.edges import SAMPLES, Arrow
from hflow.report.page.node_details import Facts
from hflow.report.page.routes import data_id, weights_id

MOST_ROWS = 60
"""Rows of a weight route that the page lists."""
HOW = {
    "shared": "both replicas use the same storage, so that nothing moves",
    "gather": "gathered bucket by bucket into the copy on the same devices",
    "pull": "gathered bucket by bucket, then pulled by the devices of the other replica",
}


@dataclass(frozen=True)
class Listing:
    """A table inside a detail."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: str = ""


@dataclass(frozen=True)
class EdgeDetail:
    """One edge in words."""

    id: str
    kind: str
    src: str
    dst: str
    label: str
    what: str
    facts: Facts
    listings: tuple[Listing, ...]
    routes: tuple[str, ...]
    """Ids of the device routes that belong to it."""


def edge_details(plan: Plan, arrows: Sequence[Arrow]) -> tuple[EdgeDetail, ...]:
    """Return the details of every edge that is drawn."""
    traffic = {row.consumer: row for row in plan.forecast.traffic} if plan.forecast else {}
    return tuple(_detail(plan, arrow, traffic.get(arrow.dst)) for arrow in arrows)


def route_listing(plan: Plan, route: WeightRoute) -> Listing:
    """Return the rows of a weight route: tensor, slice, senders, receivers."""
    rows = tuple(_route_row(route, row) for row in route.rows[:MOST_ROWS])
    more = len(route.rows) - len(rows)
    return Listing(
        title=f"{plural(len(route.rows), 'row')} of {route.src} → {route.dst}",
        columns=("tensor", "layers", "slice", "who has it", "who needs it"),
        rows=rows,
        more=f"and {more:,} more, which hflow plan --json lists" if more else "",
    )


def route_facts(route: WeightRoute) -> Facts:
    """Return the bytes of a weight route."""
    facts = [("how", HOW[route.how])]
    if route.rows or route.moved_bytes or route.held_bytes:
        facts += [
            ("moves", bytes_text(route.moved_bytes)),
            ("across machines", bytes_text(route.node_bytes)),
            ("already in place", bytes_text(route.held_bytes)),
        ]
    return tuple(facts)


def traffic_facts(row: EdgeTraffic) -> Facts:
    """Return the bytes of a node's inputs."""
    return (
        ("moves", f"{bytes_text(row.num_bytes)}, at least {bytes_text(row.lower_bound)} by any split"),
        ("across machines", bytes_text(row.num_node_bytes)),
        ("stays in place", bytes_text(row.local_bytes)),
        ("heaviest rank", f"{row.imbalance:.2f} {TIMES} the mean tokens"),
    )


def _detail(plan: Plan, arrow: Arrow, traffic: EdgeTraffic | None) -> EdgeDetail:
    what, facts, listings, routes = _words(plan, arrow, traffic)
    return EdgeDetail(
        arrow.id, str(arrow.kind), arrow.src, arrow.dst, arrow.text, what, facts, listings, routes
    )


Words = tuple[str, Facts, tuple[Listing, ...], tuple[str, ...]]
"""Meaning, facts, tables, ids of device routes."""


def _words(plan: Plan, arrow: Arrow, traffic: EdgeTraffic | None) -> Words:
    if arrow.kind is EdgeKind.DATA:
        return _data(plan, arrow, traffic)
    if arrow.kind is EdgeKind.WEIGHTS:
        return _weights(plan, arrow)
    if arrow.kind is EdgeKind.OVERWRITE:
        return (
            f"{arrow.src} reads weights that {arrow.dst} is about to change, so it comes first.",
            (),
            (),
            (),
        )
    return f"{arrow.src} and {arrow.dst} share devices, on which they take turns in this order.", (), (), ()


def _data(plan: Plan, arrow: Arrow, traffic: EdgeTraffic | None) -> Words:
    if arrow.src == arrow.dst:
        return "The node's own memory: it reads what it wrote one step before.", (), (), ()
    rule = next((rule for rule in plan.rules if rule.consumer == arrow.dst), None)
    if rule is None:
        return "Read where each sample was made: nothing moves between devices.", (), (), ()
    unit = "groups stay whole" if rule.by_group else "samples are dealt out"
    what = (
        "All samples of a step go to one worker."
        if rule.policy == "single"
        else f"A step's samples are split over {plural(len(rule.heads), 'rank')}: as few as possible move, "
        f"all ranks get about equally many tokens, {unit}."
    )
    if traffic is None:
        return what, (), (), ()
    mine = [step for step in traffic.steps if _carries(step, arrow)]
    listing = Listing(
        title=f"Largest steps that carry these fields ({plural(traffic.num_steps, 'step')} in all)",
        columns=("step", "from", "to", "samples", "bytes"),
        rows=tuple(_step(step) for step in mine),
    )
    facts = (("inputs of", f"{arrow.dst}, all edges together"), *traffic_facts(traffic))
    return what, facts, (listing,) if mine else (), (data_id(arrow.dst),)


def _carries(step: StepTraffic, arrow: Arrow) -> bool:
    """Return whether a step moves one of an edge's fields; an edge without names carries all."""
    return arrow.label == SAMPLES or any(field.rpartition("/")[2] in arrow.label for field in step.fields)


def _step(step: StepTraffic) -> tuple[str, ...]:
    sources = range_text(step.sources) if step.kind == "gather" else str(step.root)
    ends = sources, range_text(step.destinations)
    return step.kind, *ends, count_text(step.num_samples), bytes_text(step.num_bytes)


def _weights(plan: Plan, arrow: Arrow) -> Words:
    replicas = plan.placement(arrow.dst).replicas
    routes = [r for r in plan.weights if r.dst in replicas and arrow.label == (f"weights of {r.model}",)]
    behind = f"{'at most' if arrow.is_at_most else 'exactly'} {plural(arrow.lag, 'step')} before"
    what = f"{arrow.dst} reads the weights that {arrow.src} left {behind}."
    if not routes:
        return f"{what} Both use one copy, so that nothing moves.", (), (), ()
    facts = tuple(fact for route in routes for fact in route_facts(route))
    listings = tuple(route_listing(plan, route) for route in routes if route.rows)
    return what, facts, listings, tuple(map(weights_id, routes))


def _route_row(route: WeightRoute, row: RouteRow) -> tuple[str, ...]:
    layers = "" if row.layers is None else range_text(range(*row.layers))
    box = f" {TIMES} ".join(f"{start:,}{DASH}{stop:,}" for start, stop in row.box)
    sets = route.worker_sets
    return row.tensor, layers, box, range_text(sets[row.holders]), range_text(sets[row.receivers])
