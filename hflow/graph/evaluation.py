"""`evaluation_spec`: the part of a recipe that scores samples, as a recipe that learns nothing.

It has the streams that are not trained, with all their nodes. A recipe without such streams is evaluated on
its trained streams, with the nodes that give samples a number and those whose fields these read; filters
(`keep`) are left out, since every row counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hflow.base.errors import ConfigError, nearest
from hflow.graph.ir import Graph, Node, NodeSpec, RecipeSpec
from hflow.types.recorded import requestable_kinds

SAMPLED = "_sampled"
"""Ending of the names of copies that draw several samples of each prompt."""


@dataclass(frozen=True)
class Sampling:
    """Several samples of every prompt, beside what the recipe generates."""

    num_samples: int
    temperature: float


def evaluation_spec(
    spec: RecipeSpec,
    graph: Graph,
    scoring: Collection[str],
    streams: Sequence[str] = (),
    sampling: Sampling | None = None,
) -> tuple[RecipeSpec, Mapping[str, str]]:
    """Return a recipe that evaluates, and for each of its nodes the node that has its body.

    Args:
        spec: a recipe.
        graph: the recipe's graph.
        scoring: nodes that give a number to each sample.
        streams: names of the root streams to evaluate; empty: those that are not trained, or else all.
        sampling: settings to draw several samples of every prompt, in copies of the streams that generate.

    Raises:
        ConfigError: for an unknown stream, or if no node scores the samples.
    """
    chosen = _choose(graph, streams)
    kept = [node for node in graph.nodes if node.name in _kept(graph, chosen, scoring)]
    if not any(node.name in scoring for node in kept):
        raise ConfigError(
            f"recipe {spec.name!r} scores no sample of {', '.join(chosen)}; add a compute node per sample"
        )
    read = {(read.producer, read.field) for node in kept for read in node.reads}
    nodes = {node.name: _explicit(graph, node, read) for node in kept}
    bodies = {name: name for name in nodes}
    if sampling is not None:
        for node in kept:
            if _generates(graph, _root(graph, node)):
                copy = _sampled(nodes[node.name], sampling)
                nodes[copy.name], bodies[copy.name] = copy, node.name
        if len(bodies) == len(kept):
            raise ConfigError(
                f"recipe {spec.name!r} generates no samples, so it cannot draw several; remove --samples"
            )
    datasets = {node.data for node in nodes.values() if node.data is not None}
    models = {model for node in nodes.values() for model in (*node.models, *node.reads_weights)}
    evaluated = replace(
        spec,
        nodes=tuple(nodes.values()),
        dataset=next(node.data for node in nodes.values() if node.data is not None),
        models=tuple(replace(model, trainable=False) for model in spec.models if model.name in models),
        datasets=tuple(dataset for dataset in spec.datasets if dataset.name in datasets),
        unlisted=(),
    )
    return evaluated, bodies


def _choose(graph: Graph, streams: Sequence[str]) -> list[str]:
    """Return the names of the root streams to evaluate."""
    roots = {stream.name: stream for stream in graph.streams if graph.root_stream(stream.name) == stream}
    for name in streams:
        if name not in roots:
            hint = nearest(name, roots) or f"; the streams are {', '.join(roots)}"
            raise ConfigError(f"--stream: the recipe has no stream {name!r} that a dataset feeds{hint}")
    held_out = [name for name, stream in roots.items() if not stream.trained]
    return list(dict.fromkeys(streams)) or held_out or list(roots)


def _kept(graph: Graph, chosen: Collection[str], scoring: Collection[str]) -> set[str]:
    """Return the nodes that the evaluation has."""
    kept: set[str] = set()
    waiting = [
        node for node in graph.nodes if _root(graph, node) in chosen and _evaluates(graph, node, scoring)
    ]
    while waiting:
        node = waiting.pop()
        if node.name in kept:
            continue
        kept.add(node.name)
        sources = [graph.stream(read.stream).source for read in node.reads]
        sources.append(graph.stream(node.stream).source)
        parent = graph.stream(node.stream).parent
        sources += [] if parent is None else [graph.stream(parent).source]
        waiting += [graph.node(name) for name in (*(read.producer for read in node.reads), *sources)]
    return kept


def _evaluates(graph: Graph, node: Node, scoring: Collection[str]) -> bool:
    """Return whether a node of an evaluated stream belongs to the evaluation by itself."""
    if node.spec.writes_weights or node.spec.implicit:
        return False
    if any(returned.field == "keep" for returned in node.spec.returns):
        return False
    return not graph.stream(node.stream).trained or node.name in scoring


def _root(graph: Graph, node: Node) -> str:
    return graph.root_stream(node.stream).name


def _generates(graph: Graph, stream: str) -> bool:
    return graph.node(graph.stream(stream).source).spec.verb == "generate"


def _explicit(graph: Graph, node: Node, read: Collection[tuple[str, str]]) -> NodeSpec:
    """Return a spec that names its dataset, or the stream that it works on, with the cadence of one run.

    Args:
        graph: the whole recipe's graph.
        node: a node of the recipe.
        read: producer and name of each field that a kept node reads. Options that record others are dropped.
    """
    spec, stream = node.spec, graph.stream(node.stream)
    spec = replace(spec, every=1, after=0)
    if not spec.opens_stream:
        return replace(spec, on=stream.name)
    unread = {kind.option for kind in requestable_kinds() if (node.name, kind.name) not in read}
    spec = replace(spec, options=tuple((k, v) for k, v in spec.options if k not in unread))
    return replace(spec, data=stream.dataset, on=stream.parent)


def _sampled(spec: NodeSpec, sampling: Sampling) -> NodeSpec:
    """Return a copy of a node for the copy of its stream."""
    options = dict(spec.options)
    if spec.opens_stream and "temperature" in options:
        options["temperature"] = sampling.temperature
    is_root = spec.opens_stream and spec.on is None
    return replace(
        spec,
        name=spec.name + SAMPLED,
        streams=tuple(name + SAMPLED for name in spec.streams),
        on=None if spec.on is None else spec.on + SAMPLED,
        group=sampling.num_samples if is_root else spec.group,
        options=tuple(options.items()),
    )
