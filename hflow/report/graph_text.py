"""`hflow check`: a graph for people, with its warnings marked."""

from __future__ import annotations

from rich.text import Text

from hflow.graph.ir import Graph
from hflow.graph.render import render_text


def render_graph(graph: Graph) -> Text:
    """The graph by stage. Lines keep their length, so that a terminal or pager wraps them."""
    text = Text(render_text(graph).rstrip("\n"), no_wrap=True, overflow="ignore")
    text.highlight_regex(r"(?m)^warning: .*$", "yellow")
    text.highlight_regex(r"(?m)^(recipe|stage) .*$", "bold")
    return text
