"""Which streams a recipe opens, what feeds them, and on which one every node works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hflow.errors import nearest
from hflow.graph.errors import recipe_error
from hflow.graph.ir import NodeSpec, RecipeSpec, Stream
from hflow.types import Unit


@dataclass(frozen=True)
class StreamAssignment:
    """Streams, and where nodes stand in them.

    Attributes:
        streams: roots first, every derived stream after its parent.
        stream_of: node -> the stream it works on; for a source, the first that it opens.
        output_streams: node -> the streams that its fields go to.
    """

    streams: tuple[Stream, ...]
    stream_of: Mapping[str, str]
    output_streams: Mapping[str, tuple[str, ...]]

    def stream(self, name: str) -> Stream:
        """The stream of that name."""
        return next(stream for stream in self.streams if stream.name == name)

    def root(self, name: str) -> Stream:
        """The root from which a stream derives (itself if it is one)."""
        stream = self.stream(name)
        return stream if stream.parent is None else self.root(stream.parent)

    def tiers(self, name: str) -> Iterator[list[str]]:
        """Where a field is looked for: the stream, its parents, all others of the same samples."""
        seen = []
        stream: Stream | None = self.stream(name)
        while stream is not None:
            seen.append(stream.name)
            yield [stream.name]
            stream = self.stream(stream.parent) if stream.parent else None
        source = self.root(name).source
        yield [s.name for s in self.streams if s.name not in seen and self.root(s.name).source == source]


def assign_streams(spec: RecipeSpec) -> StreamAssignment:
    """Resolve the streams of a recipe.

    Raises:
        RecipeError: when a stream's name is taken, `on=` names none, or the default is not unique.
    """
    sources = [node for node in spec.nodes if node.opens_stream]
    _check_stream_names(sources, spec)
    columns = _columns(spec)
    roots = [node for node in sources if _is_root(node, columns, spec)]
    if not any(_feeds(node, spec) for node in roots):
        roots += [node for node in sources if node not in roots and node.on is None]
    streams = [stream for node in roots for stream in _root_streams(node, spec)]
    streams += _derived_streams([node for node in sources if node not in roots], streams, sources)
    stream_of = {node.name: _stream_of(node, streams, sources).name for node in spec.nodes}
    output_streams = {
        node.name: node.streams if node.opens_stream else (stream_of[node.name],) for node in spec.nodes
    }
    return StreamAssignment(tuple(streams), stream_of, output_streams)


def dataset_columns(spec: RecipeSpec, dataset: str) -> dict[str, Unit]:
    """The columns of a dataset."""
    return next(dict(d.columns) for d in spec.datasets if d.name == dataset)


def _columns(spec: RecipeSpec) -> dict[str, Unit]:
    return dataset_columns(spec, spec.dataset)


def _is_root(node: NodeSpec, columns: Mapping[str, Unit], spec: RecipeSpec) -> bool:
    """Whether a dataset feeds it: always with `data=`, never with `on=`.

    An encode node without either is fed by the recipe's dataset if that has all that it reads.
    """
    if node.data is not None and node.on is not None:
        raise recipe_error(
            node.where, node.name, "data= opens a stream of its own, on= derives one: keep one of them"
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
    """Streams that derive from others, parents first."""
    derived: list[Stream] = []
    while waiting:
        known = [*roots, *derived]
        ready = [node for node in waiting if _has_parent(node, known, sources)]
        if not ready:
            names = " -> ".join(node.name for node in waiting)
            raise recipe_error(waiting[0].where, waiting[0].name, f"streams derive from each other: {names}")
        derived += [stream for node in ready for stream in _children(node, _parent(node, known, sources))]
        waiting = [node for node in waiting if node not in ready]
    return derived


def _children(node: NodeSpec, parent: Stream) -> Iterator[Stream]:
    if node.group > 1:
        raise recipe_error(
            node.where, node.name, "a stream that derives from another has its samples: drop group="
        )
    for name in node.streams:
        yield replace(parent, name=name, source=node.name, dataset=None, parent=parent.name)


def _has_parent(node: NodeSpec, streams: Sequence[Stream], sources: Sequence[NodeSpec]) -> bool:
    opened = [name for source in sources for name in source.streams]
    return node.on is None or node.on not in opened or node.on in [stream.name for stream in streams]


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
    raise recipe_error(node.where, node.name, f"on={name!r} is no stream{hint}")


def _default(node: NodeSpec, streams: Sequence[Stream]) -> Stream:
    """The only stream fed by the recipe's dataset."""
    fed = [stream for stream in streams if stream.trained and stream.parent is None]
    if len(fed) == 1:
        return fed[0]
    if not fed:
        raise recipe_error(
            node.where, node.name, "no stream is fed by the recipe's dataset: list a generate or encode node"
        )
    names = ", ".join(stream.name for stream in fed)
    raise recipe_error(
        node.where, node.name, f"the recipe's dataset feeds several streams ({names}): choose with on="
    )


def _check_stream_names(sources: Sequence[NodeSpec], spec: RecipeSpec) -> None:
    taken = {node.name: node for node in spec.nodes}
    for source in sources:
        for name in source.streams:
            other = taken.setdefault(name, source)
            if other is not source:
                text = f"its stream {name!r} has the name of {other.name} at {other.where}"
                raise recipe_error(source.where, source.name, text)
