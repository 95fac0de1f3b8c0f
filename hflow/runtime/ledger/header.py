"""What a ledger contains before the first sample: streams, nodes and the certified lag."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hflow.graph.ir import Graph, Level
from hflow.graph.queries import PREFERRED, reported_field
from hflow.planner.plan.rows import SAVE_PREFIX, Plan, Schedule
from hflow.planner.plan.staleness import staleness_bound


@dataclass(frozen=True)
class StreamRow:
    """A root stream."""

    name: str
    source: str
    dataset: str | None
    group_size: int
    is_trained: bool
    """Whether steps train it; otherwise it is evaluated."""
    ages: bool
    """Whether trained models generate it, so that its samples age."""
    judge: str | None
    """The node whose number is the sample's reward."""


@dataclass(frozen=True)
class NodeRow:
    """A source, a sample or group node, or a batch node that gives each sample a number."""

    name: str
    stream: str
    per_group: bool
    """Whether it reports on groups; otherwise on samples."""
    field: str | None = None
    """The field whose number it reports for each sample."""
    place: str | None = None
    """File and line of its body."""


@dataclass(frozen=True)
class Header:
    """Streams and nodes of a run. The ledger refers to them by their index."""

    streams: tuple[StreamRow, ...]
    nodes: tuple[NodeRow, ...]
    max_lag: int | None
    """The largest lag that a trained token may have; None: no limit."""


def make_header(plan: Plan) -> Header:
    """Return the header of a plan's ledger."""
    return schedule_header(plan.schedule, plan.graph)


def schedule_header(schedule: Schedule, graph: Graph | None = None) -> Header:
    """Return the header of a schedule's ledger. Without a graph it has no places and no names of fields."""
    written = {model for node in schedule.nodes for model in node.writes}
    nodes = [_node_row(graph, stream.source, stream.name, per_group=False) for stream in schedule.streams]
    for node in schedule.nodes:
        row = _node_row(graph, node.name, node.stream, per_group=node.level is Level.GROUP)
        if node.level is not Level.BATCH or row.field:
            nodes.append(row)
    streams = [
        StreamRow(
            name=stream.name,
            source=stream.source,
            dataset=graph.stream(stream.name).dataset if graph else None,
            group_size=stream.group_size,
            is_trained=stream.batch is not None,
            ages=not written.isdisjoint(stream.models),
            judge=_judge(graph, stream.name, nodes),
        )
        for stream in schedule.streams
    ]
    return Header(
        tuple(streams), tuple({node.name: node for node in nodes}.values()), staleness_bound(schedule)
    )


def _node_row(graph: Graph | None, name: str, stream: str, *, per_group: bool) -> NodeRow:
    """Return the row of a node. Without a graph it has no field and no place."""
    if graph is None or name.startswith(SAVE_PREFIX):
        return NodeRow(name, stream, per_group)
    return NodeRow(name, stream, per_group, reported_field(graph, name), str(graph.node(name).spec.where))


def _judge(graph: Graph | None, stream: str, nodes: Iterable[NodeRow]) -> str | None:
    """Return the node that reports `reward`, else `score`, else the last number.

    Of several, nodes of the stream itself precede nodes of streams that were derived from it.
    """
    if graph is None:
        return None
    reporting = [node for node in nodes if node.stream == stream and node.field]
    reporting.sort(key=lambda node: graph.node(node.name).stream == stream)
    node_of_field = {node.field: node.name for node in reporting}
    preferred = (node_of_field[field] for field in PREFERRED if field in node_of_field)
    return next(preferred, next(reversed(node_of_field.values()), None))
