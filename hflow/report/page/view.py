"""Everything that the page shows, as one value of plain texts and numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.planner.plan.rows import Plan
from hflow.report.formatting import seconds_text
from hflow.report.page.details import (
    EdgeDetail,
    NodeDetail,
    ReplicaDetail,
    edge_details,
    node_details,
    replica_details,
)
from hflow.report.page.devices import DevicesView, devices_view, group_colours
from hflow.report.page.edges import arrows
from hflow.report.page.gantt import Gantt, gantt_view
from hflow.report.page.graph_view import GraphView, graph_view
from hflow.report.page.headline import Headline, headline
from hflow.report.page.memory_view import MemoryView, memory_view
from hflow.report.page.tables import Tables, tables
from hflow.report.plan_text.graph import LAG_NOTE

TERMS: tuple[tuple[str, str], ...] = (
    ("step", "One round: samples are generated and scored, then the models learn from them once."),
    ("period", "Seconds from one step to the next once the run has settled. Steps may overlap."),
    (
        "critical cycle",
        "The loop of nodes that sets the period: each waits for the one before it, and the first, in "
        "the next step, for the last. Making anything else faster changes nothing.",
    ),
    ("throughput", "Samples and tokens that a settled run works through in a second."),
    ("peak", "The most memory that any one device holds in any phase, beside what it has."),
    (
        "staleness",
        "Versions of the weights between the one that wrote a token and the one that learns from it. "
        "0 is on policy: answers are always those of the newest weights.",
    ),
    ("node", "One function of the recipe. What it reads and returns are its edges."),
    ("lag", f"How many steps an edge crosses. {LAG_NOTE}"),
    ("replica", "One copy of a model on some devices: actor@train learns, actor@gen writes answers."),
    (
        "layout",
        "How a replica is split over devices: d2t4p1 is 2 copies of the data axis, each with 4 tensor shards "
        "and 1 pipeline stage.",
    ),
    ("dp-head", "The device of a data rank that receives its samples and returns its results."),
    ("group", "Devices whose replicas take turns in a fixed order."),
    (
        "redistribution",
        "Moving samples to the devices that need them next. "
        "The lower bound is what no balanced split avoids.",
    ),
    ("weight route", "Which slice of which tensor goes from training devices to generating ones."),
    ("phase", "A part of a step with memory needs of its own: generation, waking, or one batch node."),
    ("digest", "A fingerprint of all that decides a run. Plans with equal digests run equally."),
)
"""(word, explanation)."""


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
    replicas: tuple[ReplicaDetail, ...]
    devices: DevicesView
    gantt: Gantt | None
    memory: MemoryView | None
    tables: Tables
    colours: tuple[tuple[str, int], ...]
    """(device group, number of its colour)."""
    terms: tuple[tuple[str, str], ...]
    lag: str
    """What a lag is, in one line."""


def page_view(plan: Plan) -> PageView:
    """Return what the page of a plan shows; `plan.serialise.plain` makes JSON of it."""
    times = plan.forecast.times if plan.forecast else ()
    return PageView(
        recipe=plan.recipe,
        cluster=plan.cluster.name,
        digest=plan.digest,
        headline=headline(plan),
        graph=graph_view(plan, {row.node: seconds_text(row.seconds) for row in times if row.seconds}),
        nodes=node_details(plan),
        edges=edge_details(plan, arrows(plan)),
        replicas=replica_details(plan),
        devices=devices_view(plan, [rule.consumer for rule in plan.rules if rule.fields]),
        gantt=gantt_view(plan),
        memory=memory_view(plan),
        tables=tables(plan),
        colours=tuple(group_colours(plan).items()),
        terms=TERMS,
        lag=LAG_NOTE,
    )
