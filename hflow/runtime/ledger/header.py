"""What a ledger says of its run before the first sample: streams, nodes and the certified lag."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.graph.ir import Graph, Level, NodeSpec
from hflow.plan.ir import Plan, Schedule
from hflow.plan.staleness import staleness_bound
from hflow.types import Unit


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
    sources = [
        NodeRow(stream.source, False, None, _place(graph, stream.source)) for stream in schedule.streams
    ]
    rows = [
        NodeRow(node.name, node.level is Level.GROUP, _number(graph, node.name), _place(graph, node.name))
        for node in schedule.nodes
        if node.level is not Level.BATCH
    ]
    fields = {row.name: row.field for row in rows}
    streams = tuple(
        StreamRow(
            name=stream.name,
            source=stream.source,
            dataset=graph.stream(stream.name).dataset if graph else None,
            group_size=stream.group_size,
            is_trained=stream.batch is not None,
            ages=not written.isdisjoint(stream.models),
            judge=_judge(
                {
                    n.name: fields[n.name]
                    for n in schedule.nodes
                    if n.stream == stream.name and fields.get(n.name)
                }
            ),
        )
        for stream in schedule.streams
    )
    nodes = {row.name: row for row in (*sources, *rows)}
    return Header(streams, tuple(nodes.values()), staleness_bound(schedule))


def _judge(fields: dict[str, str | None]) -> str | None:
    """The node that gives `reward`, else `score`, else whatever number comes last."""
    by_field = {field: node for node, field in fields.items()}
    return by_field.get("reward") or by_field.get("score") or next(reversed(fields), None)


def _number(graph: Graph | None, name: str) -> str | None:
    """The first number a sample that a per-sample body returns."""
    spec = _spec(graph, name)
    if spec is None or not spec.runs_as_compute or spec.level is not Level.SAMPLE:
        return None
    numbers = (r.field for r in spec.returns if r.unit is Unit.SEQUENCE and r.field != "keep")
    return next(numbers, None)


def _place(graph: Graph | None, name: str) -> str | None:
    spec = _spec(graph, name)
    return None if spec is None else str(spec.where)


def _spec(graph: Graph | None, name: str) -> NodeSpec | None:
    return graph.node(name).spec if graph else None
