"""The details of a node or an edge that the page shows when it is selected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hflow.base.text import (
    DASH,
    TIMES,
    format_bytes,
    format_count,
    format_ranges_briefly,
    format_seconds,
    pluralize,
)
from hflow.graph.field_table import UNIT_NAMES
from hflow.graph.ir import EdgeKind, Node, Read
from hflow.planner.plan.forecast import EdgeTraffic, NodeTime, StepTraffic
from hflow.planner.plan.rows import Plan, Replica, RouteRow, WeightRoute
from hflow.report.formatting import format_cadence
from hflow.report.html.plan.cards import SAMPLES, VERBS, Arrow, shape_of
from hflow.report.html.plan.routes import data_id, weights_id
from hflow.report.tables import (
    REPLICA_COLUMNS,
    ROUTE_SIZE_COLUMNS,
    is_sized,
    replica_cells,
    route_notes,
    route_sizes,
)

Facts = tuple[tuple[str, str], ...]
"""(name, value) in words."""


@dataclass(frozen=True)
class NodeDetail:
    """One node in words."""

    name: str
    verb: str
    shape: str
    what: str
    reads: tuple[tuple[str, str, str], ...]
    """(name, unit, the node or dataset that it comes from)."""
    returns: tuple[tuple[str, str], ...]
    """(field, unit)."""
    facts: Facts
    time: str
    limit: str
    parts: tuple[tuple[str, str, float], ...]
    """(name, seconds, percent) of the shares of its time."""
    knobs: Facts


ROLES = {
    "train": "trains {model}",
    "gen": "generates with the weights of {model}",
    "infer": "computes with {model}, without learning",
}
"""Role of a replica -> what it does."""


@dataclass(frozen=True)
class ReplicaDetail:
    """One replica in words."""

    name: str
    what: str
    facts: Facts
    nodes: tuple[str, ...]


def node_details(plan: Plan) -> tuple[NodeDetail, ...]:
    """Return the details of every node of the graph."""
    times = {row.node: row for row in plan.forecast.times}
    return tuple(_node_detail(plan, node, times.get(node.name)) for node in plan.graph.nodes)


def replica_details(plan: Plan) -> tuple[ReplicaDetail, ...]:
    """Return the details of every replica."""
    return tuple(_replica_detail(plan, replica) for replica in plan.replicas)


def _replica_detail(plan: Plan, replica: Replica) -> ReplicaDetail:
    nodes = (node.name for node in plan.graph.nodes)
    return ReplicaDetail(
        name=replica.name,
        what=ROLES[replica.role].format(model=replica.model),
        facts=tuple(zip(REPLICA_COLUMNS[1:], replica_cells(plan, replica), strict=True)),
        nodes=tuple(name for name in nodes if replica.name in plan.placement(name).replicas),
    )


def _node_detail(plan: Plan, node: Node, time: NodeTime | None) -> NodeDetail:
    spec = node.spec
    total = time.seconds if time else 0.0
    knobs = [(knob.name, str(knob.value)) for knob in spec.knobs]
    options = [(name, str(value)) for name, value in spec.options if value is not None]
    return NodeDetail(
        name=node.name,
        verb=spec.kind_name,
        shape=shape_of(node),
        what=VERBS[shape_of(node)] + (f"; it runs as {spec.verb}" if spec.kind else ""),
        reads=tuple(dict.fromkeys(_read(plan, node, read) for read in node.reads)),
        returns=() if spec.verb == "train" else tuple((r.field, UNIT_NAMES[r.unit]) for r in spec.returns),
        facts=tuple(_node_facts(plan, node)),
        time=format_seconds(total) if total else "",
        limit=time.limit if time else "",
        parts=tuple(
            (name, format_seconds(seconds), round(100 * seconds / total, 2))
            for name, seconds in (time.parts if time and total > 0 else ())
            if seconds > 0
        ),
        knobs=(*knobs, *options),
    )


def _read(plan: Plan, node: Node, read: Read) -> tuple[str, str, str]:
    name = (
        read.field if read.parameter in (read.field, f"@{read.field}") else f"{read.parameter} = {read.field}"
    )
    unit = UNIT_NAMES[read.unit]
    if read.source_unit is not read.unit:
        unit += f" (repeats {UNIT_NAMES[read.source_unit]})"
    if read.producer != node.name:
        return name, unit, read.producer
    dataset = plan.graph.stream(read.stream).dataset if node.spec.opens_stream else None
    return name, unit, f"dataset {dataset}" if dataset else "itself"


def _node_facts(plan: Plan, node: Node) -> Iterator[tuple[str, str]]:
    spec, placement = node.spec, plan.placement(node.name)
    yield "fires", _cadence(plan, node)
    for name in placement.replicas:
        replica = plan.replica(name)
        yield "runs on", f"{name}, {replica.layout} on devices {format_ranges_briefly(replica.workers)}"
    if not placement.replicas:
        yield "runs on", f"worker{'s' * (len(placement.heads) != 1)} {format_ranges_briefly(placement.heads)}"
    turns = [
        f"{names.index(node.name) + 1} of {len(names)} in group {group}"
        for group, names in plan.schedule.orders
        if node.name in names
    ]
    if turns:
        yield "turn", ", ".join(turns)
    cut = dict(plan.cuts).get(node.name)
    if cut is not None:
        minibatches = "one minibatch" if cut.minibatches == 1 else f"{cut.minibatches} minibatches"
        yield "learns in", f"{minibatches}, {pluralize(cut.epochs, 'epoch')}"
    if spec.has_setup:
        yield "setup", "once on each worker that runs it"
    if spec.memory:
        yield "keeps", f"{format_bytes(spec.memory)} on each worker that runs it"
    yield "stream", node.stream
    yield "body", f"{spec.body.module}.{spec.body.qualname}"


def _cadence(plan: Plan, node: Node) -> str:
    spec = node.spec
    levels = {row.name: row.level for row in plan.schedule.nodes}
    text = f"once a {levels.get(node.name, spec.level)}"
    if spec.opens_stream:
        stream = plan.graph.stream(node.stream)
        text = f"streams all the time, {pluralize(stream.group, 'sample')} a prompt"
    return text + format_cadence(spec.every, spec.after)


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

    arrow: Arrow
    what: str
    facts: Facts = ()
    listings: tuple[Listing, ...] = ()
    routes: tuple[str, ...] = ()
    """Ids of the device routes that belong to it."""


def edge_details(plan: Plan, arrows: Sequence[Arrow]) -> tuple[EdgeDetail, ...]:
    """Return the details of every edge that is drawn."""
    traffic = {row.consumer: row for row in plan.forecast.traffic}
    return tuple(_detail(plan, arrow, traffic.get(arrow.dst)) for arrow in arrows)


def route_listing(plan: Plan, route: WeightRoute) -> Listing:
    """Return the rows of a weight route: tensor, slice, senders, receivers."""
    rows = tuple(_route_row(route, row) for row in route.rows[:MOST_ROWS])
    more = len(route.rows) - len(rows)
    return Listing(
        title=f"{pluralize(len(route.rows), 'row')} of {route.src} → {route.dst}",
        columns=("tensor", "layers", "slice", "held by", "needed by"),
        rows=rows,
        more=f"and {more:,} more, which hflow plan --json lists" if more else "",
    )


def route_facts(route: WeightRoute) -> Facts:
    """Return the facts of a weight route: its way, and its sizes."""
    sizes = zip(ROUTE_SIZE_COLUMNS, route_sizes(route), strict=True) if is_sized(route) else ()
    return (("how", "; ".join((HOW[route.how], *route_notes(route)))), *sizes)


def traffic_facts(row: EdgeTraffic) -> Facts:
    """Return the bytes of a node's inputs."""
    return (
        ("moves", f"{format_bytes(row.num_bytes)}, at least {format_bytes(row.lower_bound)} by any split"),
        ("across machines", format_bytes(row.num_node_bytes)),
        ("stays in place", format_bytes(row.local_bytes)),
        ("heaviest rank", f"{row.imbalance:.2f} {TIMES} the mean tokens"),
        *([("estimated on", f"one machine in {row.scale}")] if row.scale > 1 else []),
    )


def _detail(plan: Plan, arrow: Arrow, traffic: EdgeTraffic | None) -> EdgeDetail:
    if arrow.kind is EdgeKind.DATA:
        return _data(plan, arrow, traffic)
    if arrow.kind is EdgeKind.WEIGHTS:
        return _weights(plan, arrow)
    what = f"{arrow.src} and {arrow.dst} share devices, on which they take turns in this order."
    if arrow.kind is EdgeKind.OVERWRITE:
        what = f"{arrow.src} reads weights that {arrow.dst} is about to change, so it comes first."
    return EdgeDetail(arrow, what)


def _data(plan: Plan, arrow: Arrow, traffic: EdgeTraffic | None) -> EdgeDetail:
    if arrow.src == arrow.dst:
        return EdgeDetail(arrow, "The node's own memory: it reads what it wrote one step before.")
    rule = next((rule for rule in plan.rules if rule.consumer == arrow.dst), None)
    if rule is None:
        return EdgeDetail(arrow, "Read where each sample was made: nothing moves between devices.")
    unit = "groups stay whole" if rule.by_group else "samples are dealt out"
    what = (
        "All samples of a step go to one worker."
        if rule.policy == "single"
        else f"A step's samples are split over {pluralize(len(rule.heads), 'rank')}: as few as possible "
        f"move, all ranks get about equally many tokens, {unit}."
    )
    if traffic is None:
        return EdgeDetail(arrow, what)
    carrying = [step for step in traffic.steps if _carries(step, arrow)]
    listing = Listing(
        title=f"Largest steps that carry these fields ({pluralize(traffic.num_steps, 'step')} in all)",
        columns=("step", "from", "to", "samples", "bytes"),
        rows=tuple(_step(step) for step in carrying),
    )
    facts = (("inputs of", f"{arrow.dst}, all edges together"), *traffic_facts(traffic))
    return EdgeDetail(arrow, what, facts, (listing,) if carrying else (), (data_id(arrow.dst),))


def _carries(step: StepTraffic, arrow: Arrow) -> bool:
    """Return whether a step moves one of an edge's fields; an edge without names carries all."""
    return arrow.label == SAMPLES or any(field.rpartition("/")[2] in arrow.label for field in step.fields)


def _step(step: StepTraffic) -> tuple[str, ...]:
    sources = format_ranges_briefly(step.sources) if step.kind == "gather" else str(step.root)
    ends = sources, format_ranges_briefly(step.destinations)
    return step.kind, *ends, format_count(step.num_samples), format_bytes(step.num_bytes)


def _weights(plan: Plan, arrow: Arrow) -> EdgeDetail:
    replicas = plan.placement(arrow.dst).replicas
    routes = [r for r in plan.weights if r.dst in replicas and arrow.label == (f"weights of {r.model}",)]
    lag = f"{'at most' if arrow.is_at_most else 'exactly'} {pluralize(arrow.lag, 'step')} before"
    what = f"{arrow.dst} reads the weights that {arrow.src} wrote {lag}."
    if not routes:
        return EdgeDetail(arrow, f"{what} Both use one copy, so that nothing moves.")
    facts = tuple(fact for route in routes for fact in route_facts(route))
    listings = tuple(route_listing(plan, route) for route in routes if route.rows)
    return EdgeDetail(arrow, what, facts, listings, tuple(map(weights_id, routes)))


def _route_row(route: WeightRoute, row: RouteRow) -> tuple[str, ...]:
    layers = "" if row.layers is None else format_ranges_briefly(range(*row.layers))
    box = f" {TIMES} ".join(f"{start:,}{DASH}{stop:,}" for start, stop in row.box)
    sets = route.worker_sets
    return (
        row.tensor,
        layers,
        box,
        format_ranges_briefly(sets[row.holders]),
        format_ranges_briefly(sets[row.receivers]),
    )
