"""All that the page shows, as one value of plain texts and numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.plan.ir import Plan
from hflow.report.page.devices import DevicesView, devices_view, group_colours
from hflow.report.page.edge_details import EdgeDetail, edge_details
from hflow.report.page.edges import arrows
from hflow.report.page.gantt import Gantt, gantt_view
from hflow.report.page.graph_view import GraphView, graph_view
from hflow.report.page.headline import Headline, headline
from hflow.report.page.memory_view import MemoryView, memory_view
from hflow.report.page.node_details import NodeDetail, node_details
from hflow.report.page.tables import Tables, tables
from hflow.report.page.terms import TERMS
from hflow.report.words import seconds_text


@dataclass(frozen=True)
class PageView:
    """The page."""

    recipe: str
    cluster: str
    digest: str
    headline: Headline
    graph: GraphView
    nodes: tuple[NodeDetail, ...]
    edges: tuple[EdgeDetail, ...]
    devices: DevicesView
    gantt: Gantt | None
    memory: MemoryView | None
    tables: Tables
    colours: tuple[tuple[str, int], ...]
    """(device group, number of its colour)."""
    terms: tuple[tuple[str, str], ...]
    slowest: str
    """The node that the page shows before the reader chooses one."""


def page_view(plan: Plan) -> PageView:
    """What the page of a plan shows; `plan.serialise.plain` makes JSON of it."""
    times = plan.forecast.times if plan.forecast else ()
    return PageView(
        recipe=plan.recipe,
        cluster=plan.cluster.name,
        digest=plan.digest,
        headline=headline(plan),
        graph=graph_view(plan, {row.node: seconds_text(row.seconds) for row in times if row.seconds}),
        nodes=node_details(plan),
        edges=edge_details(plan, arrows(plan)),
        devices=devices_view(plan, [rule.consumer for rule in plan.rules if rule.fields]),
        gantt=gantt_view(plan),
        memory=memory_view(plan),
        tables=tables(plan),
        colours=tuple(group_colours(plan).items()),
        terms=TERMS,
        slowest=_slowest(plan),
    )


def _slowest(plan: Plan) -> str:
    """The node that takes longest, on the critical cycle where there is one; the first without times."""
    forecast = plan.forecast
    rows = (forecast.period.cycle if forecast.period else forecast.times) if forecast else ()
    seconds = {row.node: row.seconds for row in rows}
    return max((node.name for node in plan.graph.nodes), key=lambda name: seconds.get(name, 0.0))
