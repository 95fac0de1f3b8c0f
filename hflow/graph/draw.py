"""A graph as a drawing: Graphviz and Mermaid sources."""

from __future__ import annotations

from hflow.graph.ir import Edge, EdgeKind, Graph, Node

_STYLES = {
    EdgeKind.DATA: "solid",
    EdgeKind.WEIGHTS: "bold",
    EdgeKind.OVERWRITE: "dashed",
    EdgeKind.ORDER: "dotted",
}
_ARROWS = {
    EdgeKind.DATA: "-->",
    EdgeKind.WEIGHTS: "==>",
    EdgeKind.OVERWRITE: "-.->",
    EdgeKind.ORDER: "-.->",
}


def to_dot(graph: Graph) -> str:
    """Graphviz source: `dot -Tsvg`."""
    nodes = [
        f'  "{node.name}" [shape={node.spec.shape}, label="{_label(node, chr(92) + "n")}"];'
        for node in graph.nodes
    ]
    edges = [
        f'  "{edge.src}" -> "{edge.dst}" [style={_STYLES[edge.kind]}, label="{_edge_label(edge)}"];'
        for edge in graph.edges
    ]
    return "\n".join([f'digraph "{graph.name}" {{', "  rankdir=LR;", *nodes, *edges, "}"]) + "\n"


def to_mermaid(graph: Graph) -> str:
    """Mermaid source, which GitHub and documentation sites draw."""
    nodes = [f'  {node.name}["{_label(node, "<br/>")}"]' for node in graph.nodes]
    edges = [
        f'  {edge.src} {_ARROWS[edge.kind]}|"{_edge_label(edge) or edge.kind}"| {edge.dst}'
        for edge in graph.edges
    ]
    return "\n".join(["flowchart LR", *nodes, *edges]) + "\n"


def _label(node: Node, newline: str) -> str:
    return f"{node.name}{newline}{node.spec.verb}({', '.join(node.spec.models)})"


def _edge_label(edge: Edge) -> str:
    if edge.kind is EdgeKind.DATA:
        return ", ".join(edge.fields) + (f" (lag {edge.lag})" if edge.lag else "")
    lag = ("≤" if edge.at_most else "") + str(edge.lag)
    return f"{edge.model} (lag {lag})" if edge.lag else f"{edge.model}"
