"""Edges and their lags, each kind by one pure function on the bound nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import networkx as nx

from hflow.graph.ir import Edge, EdgeKind, Graph, Level, Node, Stream


def data_edges(nodes: Sequence[Node], streams: Sequence[Stream]) -> Iterator[Edge]:
    """Fields that a node reads, and from its stream's source what any body's tensors need."""
    sources = {stream.name: stream.source for stream in streams}
    for node in nodes:
        fields: dict[str, set[str]] = {}
        for read in node.reads:
            fields.setdefault(read.producer, set()).add(read.field)
        if not node.spec.opens_stream and node.spec.verb != "update" and (_shape_fields(node) or not fields):
            fields.setdefault(sources[node.stream], set()).update(_shape_fields(node))
        for producer, names in fields.items():
            if producer != node.name:
                yield Edge(EdgeKind.DATA, producer, node.name, fields=tuple(sorted(names)))


def state_edges(nodes: Sequence[Node]) -> Iterator[Edge]:
    """A node's memory: it reads what it wrote one step before."""
    for node in nodes:
        if "state" in (kind for _, kind in node.spec.provided):
            yield Edge(EdgeKind.DATA, node.name, node.name, lag=1, fields=("state",))


def weight_edges(nodes: Sequence[Node], streams: Sequence[Stream]) -> Iterator[Edge]:
    """From every writer of a model to every reader.

    A batch reader of step k has exactly the weights that step k - 1 left (lag 1). Who runs as samples
    come (generation, per-group inference, evaluation) has at most lag 1 + staleness.
    """
    for writer in nodes:
        for reader in nodes:
            for model in _shared(writer.spec.writes_weights, reader.spec.reads_weights):
                exact = _is_in_step(reader, streams)
                yield Edge(EdgeKind.WEIGHTS, writer.name, reader.name, lag=1, model=model, at_most=not exact)


def overwrite_edges(nodes: Sequence[Node], streams: Sequence[Stream]) -> Iterator[Edge]:
    """A batch reader of step k comes before the node of step k that overwrites what it reads."""
    for reader in nodes:
        for writer in nodes:
            if writer is reader or not _is_in_step(reader, streams):
                continue
            for model in _shared(writer.spec.writes_weights, reader.spec.reads_weights):
                yield Edge(EdgeKind.OVERWRITE, reader.name, writer.name, model=model)


def max_lag(edge: Edge, max_staleness: float, sync_every: int = 1) -> int:
    """Most steps that an edge's weights may lie behind: `(staleness + 1) * sync_every` for generation."""
    if not edge.at_most:
        return edge.lag
    return edge.lag * sync_every + steps_ahead(max_staleness, sync_every)


def steps_ahead(max_staleness: float, sync_every: int) -> int:
    """Batches that generation may begin beyond those of a sync: `staleness * sync_every`, rounded up."""
    return math.ceil(round_product(max_staleness * sync_every))


def round_product(product: float) -> float:
    """A product of decimals without the last bits, by which 0.7 x 10 would be more than 7."""
    return round(product, 6)


def nodes_after_batch(graph: Graph) -> frozenset[str]:
    """Nodes that can only run once a step's batch is formed.

    These are the batch nodes, all that depends on one by data, and per-sample or per-group nodes
    with a cadence (`every`, `after`), as steps are what it counts. Root sources are never among them.
    """
    bound = {node.name for node in graph.nodes if _waits_for_batch(node)}
    data = nx.DiGraph((e.src, e.dst) for e in graph.edges if e.kind is EdgeKind.DATA and e.lag == 0)
    later = {name for start in bound if start in data for name in nx.descendants(data, start)}
    return frozenset(bound | later)


def same_step_order(edges: Iterable[Edge]) -> nx.DiGraph[str]:
    """The DiGraph of edges with lag 0: the order within a step."""
    return nx.DiGraph((edge.src, edge.dst) for edge in edges if edge.lag == 0)


def _waits_for_batch(node: Node) -> bool:
    has_cadence = (node.spec.every, node.spec.after) != (1, 0)
    return not node.spec.opens_stream and (node.spec.level is Level.BATCH or has_cadence)


def _is_in_step(node: Node, streams: Sequence[Stream]) -> bool:
    """Whether a node fires once a step, on the step's own batch."""
    trained = next((stream.trained for stream in streams if stream.name == node.stream), True)
    return node.spec.level is Level.BATCH and trained


def _shape_fields(node: Node) -> tuple[str, ...]:
    kinds = {kind for _, kind in node.spec.provided}
    if "output" in kinds:
        return ("input_ids", "loss_mask")
    return ("loss_mask",) if node.spec.level is Level.BATCH else ()


def _shared(written: Sequence[str], read: Sequence[str]) -> Iterator[str]:
    return (model for model in written if model in read)
