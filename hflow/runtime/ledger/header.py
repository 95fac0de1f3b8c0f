"""What a ledger says of its run before the first sample: streams, nodes and the certified lag."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hflow.graph.ir import Graph, Level
from hflow.planner.ir import SAVE_PREFIX, Plan, Schedule
from hflow.planner.reported_field import PREFERRED, reported_field
from hflow.planner.staleness import staleness_bound


@dataclass(frozen=True)
class StreamRow:
    """A root stream."""

    name: str
    source: str
    dataset: str | None
    group_size: int
    is_trained: bool
    """Whether its batches make the steps; else it is evaluated."""
    ages: bool
    """Whether the models that generate it are trained, so that its samples get old."""
    judge: str | None
    """The per-sample node whose number is the sample's reward."""


@dataclass(frozen=True)
class NodeRow:
    """A source, a node that works on samples or groups, or a batch node that gives each sample a number."""

    name: str
    stream: str
    per_group: bool
    """Whether it reports on groups; else on samples."""
    field: str | None = None
    """Name of the number that it gives a sample."""
    place: str | None = None
    """File and line."""


@dataclass(frozen=True)
class Header:
    """Streams and nodes of a run, by which its ledger knows them."""

    streams: tuple[StreamRow, ...]
    nodes: tuple[NodeRow, ...]
    max_lag: int | None
    """The largest lag that a trained token may have; None: unbounded."""


def header_of(plan: Plan) -> Header:
    """The header of a plan's ledger."""
    return bare_header(plan.schedule, plan.graph)


def bare_header(schedule: Schedule, graph: Graph | None = None) -> Header:
    """The header of a schedule's ledger, with places and names of fields where there is a graph."""
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
    """A node, with the number that it tells of each sample and its place where there is a graph."""
    if graph is None or name.startswith(SAVE_PREFIX):
        return NodeRow(name, stream, per_group)
    return NodeRow(name, stream, per_group, reported_field(graph, name), str(graph.node(name).spec.where))


def _judge(graph: Graph | None, stream: str, nodes: Iterable[NodeRow]) -> str | None:
    """The node that gives `reward`, else `score`, else whatever number comes last.

    Of several, one that works on the stream itself, and not on one that was opened with it.
    """
    if graph is None:
        return None
    telling = [node for node in nodes if node.stream == stream and node.field]
    telling.sort(key=lambda node: graph.node(node.name).stream == stream)
    by_field = {node.field: node.name for node in telling}
    preferred = (by_field[field] for field in PREFERRED if field in by_field)
    return next(preferred, next(reversed(by_field.values()), None))
