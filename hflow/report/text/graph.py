"""The graph as text (in a plan, and as `hflow check` prints it) and as Graphviz and Mermaid sources."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from hflow.base.text import format_ranges_briefly, pluralize
from hflow.graph.draw import PlanOverlay, to_dot, to_mermaid
from hflow.graph.ir import Edge, EdgeKind, Graph, Level, Node
from hflow.graph.queries import stages
from hflow.graph.render import render_text
from hflow.planner.diff.values import format_devices
from hflow.planner.plan.rows import SAVE_PREFIX, Plan, devices_of
from hflow.planner.plan.staleness import max_lag
from hflow.report.formatting import format_cadence
from hflow.report.text.section import Section, add_row, dim, lines, table, text

LAG_NOTE = (
    "Lag n: from n steps before. Weights of lag 1 are the newest, and staleness counts the versions beyond "
    "that: lag ≤ 2 is a staleness of at most 1."
)
NOTE = (
    "What one step computes. A node starts when all that it waits for is done: data (fields that it reads), "
    "weights (a model as earlier steps left it), overwrite (others first read the model that it changes), "
    "order (its turn on shared devices). " + LAG_NOTE
)
WIDEST_NODE = 36
COLOURS = {"data": "cyan", "weights": "magenta", "overwrite": "yellow", "order": "blue"}


def graph_section(plan: Plan, width: int) -> Section:
    """Return a row for each node, by stage."""
    shown = table(text("stage"), text("node", widest=WIDEST_NODE), text("waits for"))
    arriving = _arriving(plan)
    for stage, names in enumerate(stages(plan.graph)):
        for i, name in enumerate(names):
            node = plan.graph.node(name)
            cell = lines((Text(name, "bold"), dim(_fires(plan, node))))
            add_row(shown, "" if i else str(stage), cell, lines(_waits(node, arriving.get(name, []))))
    return Section("Graph", NOTE, (shown,))


def _fires(plan: Plan, node: Node) -> str:
    """`infer a batch on ref@infer, every 20 steps`."""
    levels = {scheduled.name: scheduled.level for scheduled in plan.schedule.nodes}
    level = levels.get(node.name, node.spec.level)
    rhythm = format_cadence(node.spec.every, node.spec.after)
    arriving = ", as they arrive" if node.spec.verb == "infer" and level is not Level.BATCH else ""
    return f"{node.spec.kind_name} a {level} on {_place(plan, node.name)}{arriving}{rhythm}"


def _place(plan: Plan, node: str) -> str:
    """Return the replicas that a node uses, or else its workers."""
    placement = plan.placement(node)
    if placement.replicas:
        return ", ".join(placement.replicas)
    shown = format_ranges_briefly(placement.heads)
    if " " in shown:
        return pluralize(len(placement.heads), "worker")
    return f"worker{'s' if len(placement.heads) > 1 else ''} {shown}"


def _arriving(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    """Return for each node (kind, words) of all edges that end there."""
    arriving: dict[str, list[tuple[str, str]]] = {}
    schedule = plan.schedule
    for edge in plan.graph.edges:
        lag = max_lag(edge, schedule.settings)
        arriving.setdefault(edge.dst, []).append(
            (str(edge.kind), describe_edge(edge) + _lag(lag, edge.at_most))
        )
    for successor in plan.order:
        words = f"after {successor.src}" + _lag(successor.lag)
        arriving.setdefault(successor.dst, []).append((str(EdgeKind.ORDER), words))
    return arriving


def describe_edge(edge: Edge) -> str:
    """Describe an edge as its reader sees it, without kind and lag."""
    if edge.kind is EdgeKind.DATA:
        return f"{edge.src} ({', '.join(edge.fields)})" if edge.fields else edge.src
    if edge.kind is EdgeKind.OVERWRITE:
        return f"{edge.model} after {edge.src}"
    return f"{edge.model} from {edge.src}"


def _lag(lag: int, at_most: bool = False) -> str:
    return f", lag {'≤ ' if at_most else ''}{lag}" if lag else ""


def _waits(node: Node, edges: list[tuple[str, str]]) -> Iterator[Text]:
    columns = [read.field for read in node.reads if read.producer == node.name and node.spec.opens_stream]
    if columns:
        yield Text.assemble(dim("dataset "), ", ".join(columns))
    for kind, colour in COLOURS.items():
        words = [word for edge_kind, word in edges if edge_kind == kind]
        if words:
            yield Text.assemble((kind, colour), f" {'; '.join(words)}")


def render_graph(graph: Graph) -> Text:
    """Render the graph by stage, with warnings marked. The terminal or pager wraps the lines."""
    text = Text(render_text(graph).rstrip("\n"), no_wrap=True, overflow="ignore")
    text.highlight_regex(r"(?m)^warning: .*$", "yellow")
    text.highlight_regex(r"(?m)^(recipe|stage) .*$", "bold")
    return text


def plan_dot(plan: Plan) -> str:
    """Return the Graphviz source of a plan: its graph with device groups, orders and saving."""
    return to_dot(plan.graph, _placed(plan))


def plan_mermaid(plan: Plan) -> str:
    """Return the Mermaid source of a plan."""
    return to_mermaid(plan.graph, _placed(plan))


def _placed(plan: Plan) -> PlanOverlay:
    saves = [p.node for p in plan.placements if p.node.startswith(SAVE_PREFIX)]
    group_of = {group.name: group for group in plan.groups}
    sets = [(group.name,) for group in plan.groups]
    groups: dict[str, tuple[str, ...]] = {}
    for names in dict.fromkeys((*sets, *(p.groups for p in plan.placements if p.groups))):
        devices = format_devices(devices_of([group_of[name] for name in names]))
        title = f"group{'s' * (len(names) > 1)} {' and '.join(names)}: devices {devices}"
        groups[title] = tuple(p.node for p in plan.placements if p.groups == names)
    return PlanOverlay(
        saves=tuple((name, name.removeprefix(SAVE_PREFIX)) for name in saves),
        orders=tuple(
            (" and ".join(row.groups), Edge(EdgeKind.ORDER, row.src, row.dst, row.lag)) for row in plan.order
        ),
        groups=tuple((title, nodes) for title, nodes in groups.items() if nodes),
    )
