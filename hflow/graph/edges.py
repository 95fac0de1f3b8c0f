"""The edges of a graph and their lags. One pure function derives each kind from the bound nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hflow.graph.arcs import Arcs
from hflow.graph.ir import Edge, EdgeKind, Graph, Level, Node, Stream


def data_edges(nodes: Sequence[Node], streams: Sequence[Stream]) -> Iterator[Edge]:
    """Yield the edges for fields that nodes read, and for the tokens and masks that packed tensors need."""
    sources = {stream.name: stream.source for stream in streams}
    for node in nodes:
        fields: dict[str, set[str]] = {}
        for read in node.reads:
            fields.setdefault(read.producer, set()).add(read.field)
        if (
            not node.spec.opens_stream
            and node.spec.verb != "update"
            and (_packing_fields(node) or not fields)
        ):
            fields.setdefault(sources[node.stream], set()).update(_packing_fields(node))
        for producer, names in fields.items():
            if producer != node.name:
                yield Edge(EdgeKind.DATA, producer, node.name, fields=tuple(sorted(names)))


def state_edges(nodes: Sequence[Node]) -> Iterator[Edge]:
    """Yield an edge from each node with a `State` to itself: it reads what it wrote one step before."""
    for node in nodes:
        if "state" in (kind for _, kind in node.spec.provided):
            yield Edge(EdgeKind.DATA, node.name, node.name, lag=1, fields=("state",))


def weight_edges(nodes: Sequence[Node], streams: Sequence[Stream]) -> Iterator[Edge]:
    """Yield an edge from every node that writes a model to every node that reads it.

    A batch node of step k reads exactly the weights after step k - 1 (lag 1). Nodes that run as samples
    arrive (generation, inference per group, evaluation) have a lag of at most 1 + `max_staleness`.
    """
    for writer in nodes:
        for reader in nodes:
            for model in _shared(writer.spec.writes_weights, reader.spec.reads_weights):
                at_most = not _is_in_step(reader, streams)
                yield Edge(EdgeKind.WEIGHTS, writer.name, reader.name, lag=1, model=model, at_most=at_most)


def overwrite_edges(nodes: Sequence[Node], streams: Sequence[Stream]) -> Iterator[Edge]:
    """Yield an edge from every batch node that reads a model to the node that overwrites it in a step."""
    for reader in nodes:
        for writer in nodes:
            if writer is reader or not _is_in_step(reader, streams):
                continue
            for model in _shared(writer.spec.writes_weights, reader.spec.reads_weights):
                yield Edge(EdgeKind.OVERWRITE, reader.name, writer.name, model=model)


def nodes_after_batch(graph: Graph) -> frozenset[str]:
    """Return the nodes that can only run once the batch of a step is complete.

    These are batch nodes, nodes that depend on one by data, and per-sample or per-group nodes with `every` or
    `after`, which count steps. Nodes that open a stream from a dataset are never among them.
    """
    waiting = {node.name for node in graph.nodes if _waits_for_batch(node)}
    data = Arcs((e.src, e.dst) for e in graph.edges if e.kind is EdgeKind.DATA and e.lag == 0)
    return frozenset(waiting.union(*map(data.descendants, waiting)))


def same_step_order(edges: Iterable[Edge], names: Iterable[str] = ()) -> Arcs:
    """Return the edges of lag 0, between nodes with some names and others: their order within a step."""
    return Arcs(((edge.src, edge.dst) for edge in edges if edge.lag == 0), names)


def _waits_for_batch(node: Node) -> bool:
    has_cadence = (node.spec.every, node.spec.after) != (1, 0)
    return not node.spec.opens_stream and (node.spec.level is Level.BATCH or has_cadence)


def _is_in_step(node: Node, streams: Sequence[Stream]) -> bool:
    """Return whether a node runs once per step, on the batch of the step."""
    trained = next((stream.trained for stream in streams if stream.name == node.stream), True)
    return node.spec.level is Level.BATCH and trained


def _packing_fields(node: Node) -> tuple[str, ...]:
    """Return the fields that hflow needs to pack the node's tensors or to run its model."""
    kinds = {kind for _, kind in node.spec.provided}
    if "output" in kinds:
        return ("input_ids", "loss_mask")
    return ("loss_mask",) if node.spec.level is Level.BATCH else ()


def _shared(written: Sequence[str], read: Sequence[str]) -> Iterator[str]:
    return (model for model in written if model in read)
