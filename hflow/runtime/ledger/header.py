"""What a ledger says of its run before the first sample: streams, nodes and the certified lag."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hflow.graph.ir import Graph, Level
from hflow.plan.ir import Plan, Schedule
from hflow.plan.numbers import PREFERRED, told_number
from hflow.plan.staleness import staleness_bound


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
    """A node that works on samples or groups, or a source."""

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
    nodes = [
        NodeRow(s.source, s.name, False, *_told(graph, s.source, is_source=True)) for s in schedule.streams
    ]
    nodes += [
        NodeRow(n.name, n.stream, n.level is Level.GROUP, *_told(graph, n.name, is_source=False))
        for n in schedule.nodes
        if n.level is not Level.BATCH
    ]
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


def _told(graph: Graph | None, name: str, *, is_source: bool) -> tuple[str | None, str | None]:
    """The number that a node tells of each sample, and the node's place."""
    if graph is None:
        return None, None
    spec = graph.node(name).spec
    tells = is_source or (spec.runs_as_compute and spec.level is Level.SAMPLE)
    field = told_number((r.field, r.unit) for r in spec.returns) if tells else None
    return field, str(spec.where)


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
