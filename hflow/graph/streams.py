"""`assign_streams`: the streams of a recipe, what feeds them, and the stream that each node works on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hflow.base.errors import nearest
from hflow.graph.errors import recipe_error
from hflow.graph.ir import NodeSpec, RecipeSpec, Stream
from hflow.types import Unit


@dataclass(frozen=True)
class StreamAssignment:
    """The streams of a recipe, and the streams of each node.

    Attributes:
        streams: streams fed by datasets, then derived ones, each after its parent.
        stream_of: node -> the stream that it works on; for a node that opens streams, the first of them.
        output_streams: node -> the streams that its fields are added to.
    """

    streams: tuple[Stream, ...]
    stream_of: Mapping[str, str]
    output_streams: Mapping[str, tuple[str, ...]]

    def stream(self, name: str) -> Stream:
        """Return the stream with a name."""
        return next(stream for stream in self.streams if stream.name == name)

    def root(self, name: str) -> Stream:
        """Return the stream fed by a dataset from which a stream derives; itself if it is one."""
        stream = self.stream(name)
        return stream if stream.parent is None else self.root(stream.parent)

    def search_order(self, name: str) -> Iterator[list[str]]:
        """Yield the streams to search for a field: the stream, its parents, others with the same samples."""
        searched = []
        stream: Stream | None = self.stream(name)
        while stream is not None:
            searched.append(stream.name)
            yield [stream.name]
            stream = self.stream(stream.parent) if stream.parent else None
        source = self.root(name).source
        yield [s.name for s in self.streams if s.name not in searched and self.root(s.name).source == source]


def assign_streams(spec: RecipeSpec) -> StreamAssignment:
    """Return the streams of a recipe and the stream of each node.

    Raises:
        RecipeError: if two streams or a stream and a node have the same name, `on=` names no stream, or there
            is not exactly one default stream.
    """
    sources = [node for node in spec.nodes if node.opens_stream]
    _check_stream_names(sources, spec)
    columns = dataset_columns(spec, spec.dataset)
    roots = [node for node in sources if _is_root(node, columns, spec)]
    if not any(_feeds(node, spec) for node in roots):
        roots += [node for node in sources if node not in roots and node.on is None]
    streams = [stream for node in roots for stream in _root_streams(node, spec)]
    streams += _derived_streams([node for node in sources if node not in roots], streams, sources)
    stream_of = {node.name: _stream_of(node, streams, sources).name for node in spec.nodes}
    output_streams = {
        node.name: node.streams if node.opens_stream else (stream_of[node.name],) for node in spec.nodes
    }
    if not spec.learns:
        streams = [replace(stream, trained=False) for stream in streams]
    return StreamAssignment(tuple(streams), stream_of, output_streams)


def dataset_columns(spec: RecipeSpec, dataset: str) -> dict[str, Unit]:
    """Return the columns of a dataset."""
    return next(dict(d.columns) for d in spec.datasets if d.name == dataset)


def _is_root(node: NodeSpec, columns: Mapping[str, Unit], spec: RecipeSpec) -> bool:
    """Return whether a dataset feeds the node: always with `data=`, never with `on=`.

    Without either, the recipe's dataset feeds a generate node, and an encode node if it has all columns that
    the node reads.
    """
    if node.data is not None and node.on is not None:
        raise recipe_error(
            node.where,
            node.name,
            "data= opens a new stream, on= derives one from another stream. Remove one of them",
        )
    if node.data is not None or node.on is not None:
        return node.on is None
    return node.verb != "encode" or all(p.field in columns or p.optional for p in node.parameters)


def _feeds(node: NodeSpec, spec: RecipeSpec) -> bool:
    return (node.data or spec.dataset) == spec.dataset


def _root_streams(node: NodeSpec, spec: RecipeSpec) -> Iterator[Stream]:
    dataset = node.data or spec.dataset
    for name in node.streams:
        yield Stream(
            name,
            node.name,
            dataset,
            None,
            node.group,
            node.every,
            node.after,
            trained=dataset == spec.dataset,
        )


def _derived_streams(
    waiting: Sequence[NodeSpec], roots: Sequence[Stream], sources: Sequence[NodeSpec]
) -> list[Stream]:
    """Return the streams that derive from others, parents first."""
    derived: list[Stream] = []
    while waiting:
        known = [*roots, *derived]
        ready = [node for node in waiting if _has_parent(node, known, sources)]
        if not ready:
            names = " -> ".join(node.name for node in waiting)
            raise recipe_error(
                waiting[0].where,
                waiting[0].name,
                f"streams derive from each other: {names}. Change on= of one of them",
            )
        derived += [stream for node in ready for stream in _children(node, _parent(node, known, sources))]
        waiting = [node for node in waiting if node not in ready]
    return derived


def _children(node: NodeSpec, parent: Stream) -> Iterator[Stream]:
    if node.group > 1:
        raise recipe_error(
            node.where, node.name, "a stream that derives from another has the same samples. Remove group="
        )
    for name in node.streams:
        yield replace(parent, name=name, source=node.name, dataset=None, parent=parent.name)


def _has_parent(node: NodeSpec, streams: Sequence[Stream], sources: Sequence[NodeSpec]) -> bool:
    """Return whether the parent of a stream is known, or does not exist at all."""
    all_names = [name for source in sources for name in source.streams]
    return node.on is None or node.on not in all_names or node.on in [stream.name for stream in streams]


def _parent(node: NodeSpec, streams: Sequence[Stream], sources: Sequence[NodeSpec]) -> Stream:
    return _named(node, node.on, streams) if node.on is not None else _default(node, streams)


def _stream_of(node: NodeSpec, streams: Sequence[Stream], sources: Sequence[NodeSpec]) -> Stream:
    if node.opens_stream:
        return _named(node, node.streams[0], streams)
    if node.on is not None:
        return _named(node, node.on, streams)
    if node.verb == "update" and any(stream.trained for stream in streams):
        return next(stream for stream in streams if stream.trained)
    return _default(node, streams)


def _named(node: NodeSpec, name: str, streams: Sequence[Stream]) -> Stream:
    for stream in streams:
        if stream.name == name:
            return stream
    names = [stream.name for stream in streams]
    hint = nearest(name, names) or f"; the streams are {', '.join(names)}"
    raise recipe_error(node.where, node.name, f"there is no stream {name!r} for on={hint}")


def _default(node: NodeSpec, streams: Sequence[Stream]) -> Stream:
    """Return the only stream that the recipe's dataset feeds."""
    candidates = [stream for stream in streams if stream.trained and stream.parent is None]
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise recipe_error(
            node.where, node.name, "the recipe's dataset feeds no stream. List a generate or encode node"
        )
    names = ", ".join(stream.name for stream in candidates)
    raise recipe_error(
        node.where, node.name, f"the recipe's dataset feeds several streams ({names}). Choose one with on="
    )


def _check_stream_names(sources: Sequence[NodeSpec], spec: RecipeSpec) -> None:
    owners = {node.name: node for node in spec.nodes}
    for source in sources:
        for name in source.streams:
            other = owners.setdefault(name, source)
            if other is not source:
                problem = (
                    f"its stream {name!r} has the same name as {other.name} at {other.where}. Rename one"
                )
                raise recipe_error(source.where, source.name, problem)
