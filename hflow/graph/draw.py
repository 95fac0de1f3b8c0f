"""Drawings of a graph: Graphviz and Mermaid sources, with what a plan adds to the graph.

Each verb has a colour and each kind of edge a line style. The label of an edge names its fields or its kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hflow.graph.ir import Edge, EdgeKind, Graph, Node

_STYLES = {
    EdgeKind.DATA: 'color="#1f2937"',
    EdgeKind.WEIGHTS: 'color="#b45309", style=bold',
    EdgeKind.OVERWRITE: 'color="#b91c1c", style=dashed',
    EdgeKind.ORDER: 'color="#6b7280", style=dotted',
}
_ARROWS = {
    EdgeKind.DATA: "-->",
    EdgeKind.WEIGHTS: "==>",
    EdgeKind.OVERWRITE: "-.->",
    EdgeKind.ORDER: "-.->",
}
_FILLS = {
    "encode": "#e0e7ff",
    "generate": "#dbeafe",
    "compute": "#f3f4f6",
    "infer": "#dcfce7",
    "train": "#ffedd5",
    "update": "#fef3c7",
    "save": "#ede9fe",
}
_USER_FILL = "#fce7f3"
"""Colour of node types that a user defines."""
_DOT_DEFAULTS = (
    "  rankdir=LR;",
    '  node [style=filled, fontname="sans-serif"];',
    '  edge [fontname="sans-serif", fontsize=10];',
)
_RESERVED = frozenset({"call", "class", "classDef", "click", "default", "end", "flowchart", "graph", "href"})
_RESERVED |= {"interpolate", "linkStyle", "style", "subgraph"}
"""Words that Mermaid does not accept as the name of a node."""


@dataclass(frozen=True)
class PlanOverlay:
    """The additions of a plan to the drawing of its graph."""

    saves: tuple[tuple[str, str], ...] = ()
    """Nodes that save a model: (name, model)."""
    orders: tuple[tuple[str, Edge], ...] = ()
    """Order edges, each with its device groups."""
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Sets of device groups: title and nodes. A node is in at most one set."""


_NO_OVERLAY = PlanOverlay()


@dataclass(frozen=True)
class _Box:
    """A node of the drawing."""

    name: str
    verb: str
    shape: str
    lines: tuple[str, ...]


def to_dot(graph: Graph, overlay: PlanOverlay = _NO_OVERLAY) -> str:
    """Return Graphviz source, for `dot -Tsvg`."""
    boxes = {box.name: f"  {_dot_box(box)}" for box in _boxes(graph, overlay)}
    lines = [f"digraph {_dot(graph.name)} {{", *_DOT_DEFAULTS]
    for number, (title, names) in enumerate(overlay.groups):
        lines += [f"  subgraph cluster_{number} {{", f"    label={_dot(title)};"]
        lines += [f"  {boxes.pop(name)}" for name in names]
        lines.append("  }")
    lines += [
        *boxes.values(),
        *(f"  {_dot_edge(edge, label)}" for edge, label in _edges(graph, overlay)),
        "}",
    ]
    return "\n".join(lines) + "\n"


def to_mermaid(graph: Graph, overlay: PlanOverlay = _NO_OVERLAY) -> str:
    """Return Mermaid source, which GitHub and documentation sites render."""
    drawn = list(_boxes(graph, overlay))
    boxes = {box.name: f"  {_mermaid_box(box)}" for box in drawn}
    lines = ["flowchart LR"]
    for number, (title, names) in enumerate(overlay.groups):
        lines.append(f'  subgraph group.{number}["{_mermaid(title)}"]')
        lines += [f"  {boxes.pop(name)}" for name in names]
        lines.append("  end")
    lines += boxes.values()
    for edge, label in _edges(graph, overlay):
        lines.append(f'  {_id(edge.src)} {_ARROWS[edge.kind]}|"{_mermaid(label)}"| {_id(edge.dst)}')
    verbs = dict.fromkeys(box.verb for box in drawn)
    lines += [f"  classDef {_class(verb)} fill:{_fill(verb)},color:#111827" for verb in verbs]
    return "\n".join(lines) + "\n"


def _boxes(graph: Graph, overlay: PlanOverlay) -> Iterator[_Box]:
    for node in graph.nodes:
        yield _Box(node.name, node.spec.kind_name, node.spec.shape, (node.name, _signature(node)))
    for name, model in overlay.saves:
        yield _Box(name, "save", "cylinder", (name, f"save({model})"))


def _signature(node: Node) -> str:
    return f"{node.spec.kind_name}({', '.join(node.spec.models)})"


def _edges(graph: Graph, overlay: PlanOverlay) -> Iterator[tuple[Edge, str]]:
    """Yield every edge with its label."""
    yield from ((edge, _label(edge)) for edge in graph.edges)
    for group, edge in overlay.orders:
        yield edge, f"order of {group}" + (f", lag {edge.lag}" if edge.lag else "")


def _label(edge: Edge) -> str:
    """Return the fields, or the kind and the model, and the lag of an edge into a later step."""
    if edge.kind is EdgeKind.DATA:
        text = ", ".join(edge.fields) or "samples"
    elif edge.kind is EdgeKind.WEIGHTS:
        text = f"weights of {edge.model}"
    else:
        text = f"before {edge.model} is overwritten"
    if edge.at_most:
        return f"{text}, lag ≤ {edge.lag} + max_staleness"
    return f"{text}, lag {edge.lag}" if edge.lag else text


def _dot_box(box: _Box) -> str:
    label = "\\n".join(_dot(line)[1:-1] for line in box.lines)
    return f'{_dot(box.name)} [shape={box.shape}, fillcolor="{_fill(box.verb)}", label="{label}"];'


def _dot_edge(edge: Edge, label: str) -> str:
    """Return one edge. Edges into a later step do not constrain ranks, so that steps read left to right."""
    loose = ", constraint=false" if edge.lag or edge.at_most else ""
    return f"{_dot(edge.src)} -> {_dot(edge.dst)} [{_STYLES[edge.kind]}, label={_dot(label)}{loose}];"


def _dot(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _mermaid_box(box: _Box) -> str:
    return f'{_id(box.name)}["{"<br/>".join(map(_mermaid, box.lines))}"]:::{_class(box.verb)}'


def _mermaid(text: str) -> str:
    return text.replace("#", "#35;").replace('"', "#quot;")


def _id(name: str) -> str:
    return f"{name}_" if name in _RESERVED else name


def _fill(verb: str) -> str:
    return _FILLS.get(verb, _USER_FILL)


def _class(verb: str) -> str:
    return re.sub(r"\W", "_", verb) + "_"
