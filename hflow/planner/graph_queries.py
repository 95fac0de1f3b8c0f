"""Questions about a graph, or a plan, that several packages ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hflow.graph.ir import Graph, Node, NodeSpec, Stream
from hflow.planner.ir import Plan


def root_stream(graph: Graph, node: Node) -> Stream:
    """Return the stream, fed by a dataset, whose samples a node opens or works on.

    Streams that one node opens share their samples; the first of them represents all.
    """
    if node.spec.opens_stream:
        opened = next(stream for stream in graph.streams if stream.source == node.name)
        return graph.root_stream(opened.name)
    return graph.root_stream(node.stream)


def root_streams(graph: Graph) -> tuple[Stream, ...]:
    """Return the root streams of all sources, trained streams first."""
    roots = dict.fromkeys(root_stream(graph, node).name for node in graph.nodes if node.spec.opens_stream)
    return tuple(sorted((graph.stream(name) for name in roots), key=lambda stream: not stream.trained))


def trained_models(graph: Graph) -> tuple[str, ...]:
    """Return the models that a node other than an update writes, in the recipe's order."""
    written = {m for node in graph.nodes if node.spec.verb != "update" for m in node.spec.writes_weights}
    return tuple(model.name for model in graph.models if model.name in written)


def written_models(graph: Graph) -> frozenset[str]:
    """Return the models whose weights change during the run."""
    return frozenset(model for node in graph.nodes for model in node.spec.writes_weights)


def saved_models(graph: Graph) -> tuple[str, ...]:
    """Return the models that a checkpoint holds: those whose weights change, in the recipe's order."""
    written = written_models(graph)
    return tuple(model.name for model in graph.models if model.name in written)


def runs_outside_engines(graph: Graph, model: str) -> bool:
    """Return whether a node trains a model, infers with it or updates it."""
    return any(
        model in (*node.spec.reads_weights, *node.spec.writes_weights)
        for node in graph.nodes
        if not node.spec.opens_stream
    )


def returns_keep(node: Node) -> bool:
    """Return whether a node may refuse samples or groups."""
    return any(returned.field == "keep" for returned in node.spec.returns)


def num_firings(spec: NodeSpec, num_steps: int) -> int:
    """Return the number of times that a batch node fires in the first steps of a run."""
    return len(range(spec.after, num_steps, spec.every))


def scheduled_updates(plan: Plan, num_steps: int) -> Mapping[str, int]:
    """Return trained model -> its optimizer steps in the first `num_steps` steps, if none is skipped."""
    cuts, updates = dict(plan.cuts), Counter[str]()
    for node in plan.graph.nodes:
        if node.name in cuts:
            cut = cuts[node.name]
            for model in node.spec.writes_weights:
                updates[model] += num_firings(node.spec, num_steps) * cut.minibatches * cut.epochs
    return updates
