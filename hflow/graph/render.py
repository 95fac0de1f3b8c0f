"""A graph as plain text: what `hflow check` prints."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from hflow.graph.edges import nodes_after_batch, same_step_order
from hflow.graph.field_table import UNIT_NAMES
from hflow.graph.ir import FIRST_PASS, Edge, EdgeKind, Graph, Level, Node, Read, Stream


def render_text(graph: Graph) -> str:
    """Return the graph as text, by stage: the length of the longest chain of lag-0 edges before a node."""
    return "\n".join(line.rstrip() for line in _lines(graph)) + "\n"


def stages(graph: Graph) -> dict[str, int]:
    """Return for each node the length of the longest chain of edges within a step that leads to it."""
    order = same_step_order(graph.edges)
    depth = {node.name: 0 for node in graph.nodes}
    for name in chain(*order.generations()):
        depth[name] = max((depth[before] + 1 for before in order.before(name)), default=0)
    return depth


def describe(edge: Edge) -> str:
    """Return an edge in words, as its destination sees it."""
    if edge.kind is EdgeKind.DATA and edge.lag:
        return "its own state of the step before"
    if edge.kind is EdgeKind.DATA:
        return f"{', '.join(edge.fields) or 'samples'} from {edge.src}"
    if edge.kind is EdgeKind.WEIGHTS:
        lag = f"at most {edge.lag} + staleness" if edge.at_most else f"exactly {edge.lag}"
        return f"weights of {edge.model} from {edge.src}, lag {lag}"
    return f"after {edge.src}, which reads the weights of {edge.model} that it overwrites"


def _lines(graph: Graph) -> Iterator[str]:
    yield f"recipe {graph.name}: {len(graph.nodes)} nodes, {len(graph.edges)} edges"
    yield ""
    yield from _models(graph)
    yield ""
    for stream in graph.streams:
        yield f"stream {stream.name}: {_stream(stream)}"
    depth, after_batch = stages(graph), nodes_after_batch(graph)
    for stage in range(max(depth.values(), default=-1) + 1):
        yield ""
        yield f"stage {stage}"
        for node in graph.nodes:
            if depth[node.name] == stage:
                yield from _node(graph, node, node.name in after_batch)
    for title, rows in (("skipped", graph.skipped), ("optional", graph.notes), ("warning", graph.warnings)):
        if rows:
            yield ""
        yield from (f"{title}: {row}" for row in rows)


def _models(graph: Graph) -> Iterator[str]:
    for model in graph.models:
        kind = "trainable" if model.trainable else "frozen"
        start = f", starts as {model.init_from.name}" if model.init_from else ""
        yield f"model {model.name}: {kind}, head {model.head}{start}"


def _stream(stream: Stream) -> str:
    origin = f"derives from {stream.parent}" if stream.parent else f"fed by {stream.dataset}"
    group = f", groups of {stream.group}" if stream.group > 1 else ""
    if stream.trained:
        return f"{origin}{group}"
    return f"{origin}{group}, every {stream.every} steps after {stream.after}, not trained on"


def _node(graph: Graph, node: Node, after_batch: bool) -> Iterator[str]:
    spec = node.spec
    title = f"{spec.name}  {spec.kind_name}({', '.join(spec.models)})"
    yield f"  {title} {_when(node, after_batch)} on {node.stream}"
    if node.reads:
        # An option may read a field that a parameter reads too.
        yield f"      reads    {', '.join(dict.fromkeys(_read(node, read) for read in node.reads))}"
    for name, kind in spec.provided:
        if kind == FIRST_PASS:
            yield f"      first    {name}, on each whole minibatch"
    if spec.returns:
        yield f"      returns  {', '.join(f'{r.field}: {UNIT_NAMES[r.unit]}' for r in spec.returns)}"
    for edge in graph.edges:
        if edge.dst == node.name:
            yield f"      <- {describe(edge)}"


def _when(node: Node, after_batch: bool) -> str:
    cadence = f", every {node.spec.every} after {node.spec.after}"
    level = f"per {node.spec.level}"
    if node.spec.level is not Level.BATCH and after_batch:
        level += ", once the batch is formed"
    return level if (node.spec.every, node.spec.after) == (1, 0) else level + cadence


def _read(node: Node, read: Read) -> str:
    parameter = read.parameter.removeprefix("@")
    name = parameter if parameter == read.field else f"{parameter}={read.field}"
    joined = f" of {read.stream}" if read.stream != node.stream else ""
    repeated = f" (repeated from {UNIT_NAMES[read.source_unit]})" if read.source_unit is not read.unit else ""
    return f"{name}{joined}{repeated}"
