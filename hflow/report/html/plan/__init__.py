"""`render_page`: a plan as one self-contained HTML file.

`page_view` decides what is shown, as one value of plain texts and numbers; templates write it as HTML and
SVG, and the script only reacts to the reader. Equal plans give equal bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hflow.base.text import format_seconds
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.serialise import to_plain
from hflow.report.html.plan.cards import arrows
from hflow.report.html.plan.details import (
    EdgeDetail,
    Listing,
    NodeDetail,
    ReplicaDetail,
    edge_details,
    node_details,
    replica_details,
    route_listing,
)
from hflow.report.html.plan.devices import DevicesView, MemoryView, devices_view, group_colours, memory_view
from hflow.report.html.plan.gantt import Gantt, gantt_view
from hflow.report.html.plan.graph_view import GraphView, graph_view
from hflow.report.html.plan.headline import Headline, headline
from hflow.report.tables import (
    TableView,
    data_table,
    placements_table,
    replicas_table,
    times_table,
    weights_table,
)
from hflow.report.text.graph import LAG_NOTE

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
    tables: tuple[TableView, ...]
    slices: tuple[Listing, ...]
    """The rows of weight routes."""
    routing: tuple[tuple[str, int], ...]
    """(key, worker), in the order of the plan."""
    colours: tuple[tuple[str, int], ...]
    """(device group, number of its colour)."""
    terms: tuple[tuple[str, str], ...]
    lag: str
    """What a lag is, in one line."""


def page_view(plan: Plan) -> PageView:
    """Return the content of a plan's page; `plan.serialise.plain` makes JSON of it."""
    times = plan.forecast.times
    tables = (
        placements_table(plan),
        replicas_table(plan),
        times_table(plan),
        data_table(plan, assumptions="above"),
        weights_table(plan),
    )
    return PageView(
        recipe=plan.recipe,
        cluster=plan.cluster.name,
        digest=plan.digest,
        headline=headline(plan),
        graph=graph_view(plan, {row.node: format_seconds(row.seconds) for row in times if row.seconds}),
        nodes=node_details(plan),
        edges=edge_details(plan, arrows(plan)),
        replicas=replica_details(plan),
        devices=devices_view(plan, [rule.consumer for rule in plan.rules if rule.fields]),
        gantt=gantt_view(plan),
        memory=memory_view(plan),
        tables=tuple(table for table in tables if table.rows),
        slices=tuple(route_listing(plan, route) for route in plan.weights if route.rows),
        routing=tuple((row.key, row.worker) for row in plan.routing),
        colours=tuple(group_colours(plan).items()),
        terms=TERMS,
        lag=LAG_NOTE,
    )


STYLES = ("base.css", "graph.css", "charts.css", "devices.css", "print.css")
SCRIPTS = ("select.js", "devices.js", "tips.js", "theme.js", "wide.js")
SECTIONS = (
    ("graph", "Graph"),
    ("devices", "Devices"),
    ("schedule", "Schedule"),
    ("memory", "Memory"),
    ("tables", "Tables"),
    ("words", "Words"),
)
"""(id, title) of the sections that the page's head links to."""
IN_SCRIPT = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
"""Characters that could end a script element, as JSON escapes."""


def render_page(plan: Plan, sizes: TableView | None = None) -> str:
    """Return the HTML page of a plan, with the clusters among which `hflow size` chose the plan's."""
    view = page_view(plan)
    return (
        page_environment(__name__)
        .get_template("page.html.jinja")
        .render(
            view=view,
            sizes=sizes,
            sections=(*((("sizes", "Sizes"),) if sizes else ()), *SECTIONS),
            style=joined_files(__name__, STYLES),
            script=joined_files(__name__, SCRIPTS),
            data=script_json(_for_script(view)),
        )
    )


def page_environment(package: str) -> Environment:
    """Return the environment of a package's templates, which may use those of this one."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(__name__)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _for_script(view: PageView) -> dict[str, Any]:
    """Return the data that the script needs; everything else is in the page's text."""
    row = to_plain(view.devices)
    names = ("per_machine", "replicas", "routes", "sets", "peaks")
    keys, workers = zip(*view.routing, strict=True)
    return {
        "devices": {name: row[name] for name in names},
        "routing": {"keys": keys, "workers": workers},
    }


def joined_files(package: str, names: tuple[str, ...]) -> Markup:
    """Return the contents of a package's template files that are included unchanged."""
    folder = files(package) / "templates"
    return Markup("\n".join((folder / name).read_text(encoding="utf-8") for name in names))


def script_json(value: Any) -> Markup:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.translate(IN_SCRIPT))
