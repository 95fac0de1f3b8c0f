"""Graphs as text and as drawings: the output of `hflow check`, and Graphviz and Mermaid sources of a plan."""

from __future__ import annotations

from rich.text import Text

from hflow.graph.draw import PlanOverlay, to_dot, to_mermaid
from hflow.graph.ir import Edge, EdgeKind, Graph
from hflow.graph.render import render_text
from hflow.planner.diff.values import device_ranges
from hflow.planner.plan.rows import SAVE_PREFIX, Plan, devices_of


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
        devices = device_ranges(devices_of([group_of[name] for name in names]))
        title = f"group{'s' * (len(names) > 1)} {' and '.join(names)}: devices {devices}"
        groups[title] = tuple(p.node for p in plan.placements if p.groups == names)
    return PlanOverlay(
        saves=tuple((name, name.removeprefix(SAVE_PREFIX)) for name in saves),
        orders=tuple(
            (" and ".join(row.groups), Edge(EdgeKind.ORDER, row.src, row.dst, row.lag)) for row in plan.order
        ),
        groups=tuple((title, nodes) for title, nodes in groups.items() if nodes),
    )
