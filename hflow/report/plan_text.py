"""`hflow plan`: a plan for people, in 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hflow.graph.ir import Edge, EdgeKind
from hflow.plan.ir import Plan, Replica
from hflow.plan.order import stages

NUM_ROUTES_SHOWN = 6
"""Routing rows of one replica; the rest follows the same order and is counted."""
NUM_LISTED = 6
"""Workers listed one by one where they are no range."""


def render_plan(plan: Plan) -> RenderableType:
    """The whole plan: graph, placement, routing, rules for data and weights, streams, warnings."""
    parts: list[RenderableType] = [
        _header(plan),
        _nodes(plan),
        _replicas(plan),
        _groups(plan),
        _routing(plan),
        _rules(plan),
    ]
    if plan.weights:
        parts.append(_weights(plan))
    parts.append(_streams(plan))
    parts += [Text(f"warning: {warning}", style="yellow") for warning in plan.warnings]
    return Group(*parts)


def worker_range(workers: Sequence[int]) -> str:
    """Workers in few letters: `0-7` for neighbours, `0 2 4`, or `0 2 4 ... 62 (32)` for many."""
    if len(workers) > 1 and tuple(workers) == tuple(range(workers[0], workers[-1] + 1)):
        return f"{workers[0]}-{workers[-1]}"
    if len(workers) <= NUM_LISTED:
        return " ".join(map(str, workers))
    return f"{workers[0]} {workers[1]} {workers[2]} ... {workers[-1]} ({len(workers)})"


def describe_edge(edge: Edge) -> str:
    """An edge as its reader sees it: kind, where from, lag."""
    if edge.kind is EdgeKind.DATA:
        fields = f" ({', '.join(edge.fields)})" if edge.fields else ""
        return f"{edge.src}{fields}" + (f", lag {edge.lag}" if edge.lag else "")
    if edge.kind is EdgeKind.OVERWRITE:
        return f"{edge.src} before {edge.model} is overwritten"
    bound = f"lag at most {edge.lag} + max_staleness" if edge.at_most else f"lag {edge.lag}"
    return f"weights {edge.model} of {edge.src}, {bound}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _header(plan: Plan) -> Panel:
    cluster, schedule = plan.cluster, plan.schedule
    lines = [
        f"[bold]{plan.recipe}[/] on [bold]{cluster.name}[/]: {cluster.num_nodes} x "
        f"{cluster.devices_per_node} {cluster.device} devices of {cluster.memory_bytes / 2**30:.0f} GiB",
        f"{schedule.num_steps} steps, at most {schedule.max_concurrent} samples in flight, "
        f"stops above {schedule.max_refused_per_step} refused groups a step",
        staleness_line(plan),
        f"digest {plan.digest}",
    ]
    return Panel("\n".join(lines), box=box.ROUNDED, width=100)


def staleness_line(plan: Plan) -> str:
    """The staleness certificate in one line."""
    if plan.staleness_bound is None:
        return "staleness: unbounded"
    schedule = plan.schedule
    return (
        f"staleness: the version lag of a trained token is at most {plan.staleness_bound} "
        f"(max_staleness {schedule.max_staleness}, sync_every {schedule.sync_every})"
    )


def _nodes(plan: Plan) -> Table:
    levels = {node.name: str(node.level) for node in plan.schedule.nodes}
    table = _table("Graph", "stage", "node", "verb", "fires per", "runs on", "waits for")
    for stage, names in enumerate(stages(plan.graph)):
        for name in names:
            spec = plan.graph.node(name).spec
            edges = [describe_edge(edge) for edge in plan.graph.edges if edge.dst == name]
            level = levels.get(name, str(spec.level)) + _cadence(spec.every, spec.after)
            table.add_row(str(stage), name, spec.verb, level, _where(plan, name), "\n".join(edges))
    return table


def _cadence(every: int, after: int) -> str:
    if every == 1 and after == 0:
        return ""
    return f", every {every}" + (f" after {after}" if after else "")


def _where(plan: Plan, node: str) -> str:
    placement = plan.placement(node)
    if placement.replicas:
        return ", ".join(placement.replicas)
    plural = "s" if len(placement.heads) > 1 else ""
    return f"worker{plural} {worker_range(placement.heads)}"


def _replicas(plan: Plan) -> Table:
    table = _table("Replicas", "replica", "backend", "layout", "group", "workers", "dp-heads")
    for replica in plan.replicas:
        workers, heads = worker_range(replica.workers), worker_range(replica.heads)
        table.add_row(replica.name, replica.backend, str(replica.layout), replica.group, workers, heads)
    return table


def _groups(plan: Plan) -> Table:
    orders, shared = dict(plan.schedule.orders), dict(plan.schedule.shared)
    table = _table("Device groups", "group", "devices", "turns of each step, in cyclic order")
    for group in plan.groups:
        turns = [f"[{engine}]" for engine in shared.get(group.name, ())] + list(orders.get(group.name, ()))
        engines = [r.name for r in plan.replicas if r.group == group.name and r.role == "gen"]
        alone = Text(f"{', '.join(engines)} all the time" if engines else "none")
        shown = Text(" -> ".join(turns) + " -> again") if orders.get(group.name) else alone
        table.add_row(group.name, worker_range(group.devices), shown)
    return table


def _routing(plan: Plan) -> Table:
    table = _table("Routing: key -> worker (model, dp, tp, pp)", "of", "keys")
    start = 0
    for replica in plan.replicas:
        rows = plan.routing[start : start + replica.layout.world]
        start += replica.layout.world
        table.add_row(replica.name, _routes((row.key, row.worker) for row in rows))
    rest = plan.routing[start:]
    data = [(row.key, row.worker) for row in rest if row.key.startswith("__data")]
    table.add_row("source", _routes(data))
    table.add_row("workers", f"{len(rest) - len(data)} bare indices, each to itself")
    return table


def _routes(rows: Iterable[tuple[str, int]]) -> str:
    shown = [f"{key} -> {worker}" for key, worker in rows]
    more = len(shown) - NUM_ROUTES_SHOWN
    return "\n".join(shown[:NUM_ROUTES_SHOWN]) + (f"\n... and {more} more" if more > 0 else "")


def _rules(plan: Plan) -> Table:
    cuts = dict(plan.cuts)
    table = _table("Data", "consumer", "reads", "dp-heads", "split", "minibatches x epochs")
    for rule in plan.rules:
        if rule.fields:
            unit = "groups" if rule.by_group else "samples"
            split = f"{unit}, balanced" if rule.policy == "balanced" else "all to one"
            cut = cuts.get(rule.consumer)
            times = f"{cut.minibatches} x {cut.epochs}" if cut else ""
            fields = _fields(rule.stream, rule.fields)
            table.add_row(rule.consumer, fields, worker_range(rule.heads), split, times)
    return table


def _fields(stream: str, fields: Iterable[str]) -> str:
    """Fields of the consumer's own stream by their short names."""
    return ", ".join(field.removeprefix(f"{stream}/") for field in fields)


def _weights(plan: Plan) -> Table:
    table = _table("Weights", "model", "route", "how", "from -> to")
    for route in plan.weights:
        src, dst = plan.replica(route.src), plan.replica(route.dst)
        ends = f"{_shape(src)} -> {_shape(dst)}"
        table.add_row(route.model, f"{route.src} -> {route.dst}", route.how, ends)
    return table


def _shape(replica: Replica) -> str:
    return f"{replica.layout} on {worker_range(replica.workers)}"


def _streams(plan: Plan) -> Table:
    table = _table("Streams", "stream", "groups a step", "samples a group", "engines", "cadence")
    for stream in plan.schedule.streams:
        batch = str(stream.batch) if stream.batch is not None else "whole dataset"
        size = f"{stream.group_size}" + (f" (least {stream.min_group})" if stream.min_group > 1 else "")
        cadence = "every step" if stream.batch is not None else f"every {stream.every} steps"
        table.add_row(stream.name, batch, size, ", ".join(stream.replicas) or "none", cadence)
    return table
