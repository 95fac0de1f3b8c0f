"""Questions about a graph that several packages ask, such as a node's one number per sample."""

from __future__ import annotations

from collections.abc import Iterable

from hflow.graph.arcs import Arcs
from hflow.graph.edges import nodes_after_batch
from hflow.graph.ir import EdgeKind, Graph, Level, Node, NodeSpec, Stream
from hflow.types import Unit


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


def missing_correction(node: Node) -> str | None:
    """Return the correction that a train node's loss lacks for an engine that differs from the trainer.

    None: it corrects it, by the weight `exp(prox - behav)`.
    """
    spec, key = node.spec, f"nodes.{node.name}"
    if "behav_weight_cap" not in spec.knob_values:
        return f"{node.name} does not correct its loss for it; nodes.actor_train and gspo_train do."
    if spec.option("prox") not in ("recompute", "metrics"):
        return f"{key}.prox=recompute {key}.over_cap=truncate corrects the loss."
    return None


def returns_keep(node: Node) -> bool:
    """Return whether a node may refuse samples or groups."""
    return any(returned.field == "keep" for returned in node.spec.returns)


def num_firings(spec: NodeSpec, num_steps: int) -> int:
    """Return the number of times that a batch node fires in the first steps of a run."""
    return len(range(spec.after, num_steps, spec.every))


def same_step(graph: Graph) -> Arcs:
    """Return the lag-0 edges: an arc means "before, in the same step"."""
    arcs = ((e.src, e.dst) for e in graph.edges if e.lag == 0 and not e.at_most)
    return Arcs(arcs, (node.name for node in graph.nodes))


def data_flow(graph: Graph) -> Arcs:
    """Return the data edges within a step."""
    arcs = ((e.src, e.dst) for e in graph.edges if e.kind is EdgeKind.DATA and e.lag == 0)
    return Arcs(arcs, (node.name for node in graph.nodes))


def topological_order(graph: Graph) -> list[str]:
    """Return node names in an order in which lag-0 edges point forward; ties keep the recipe's order.

    Every device group takes its cyclic order from this one, so no two groups can wait for each other.
    """
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    return list(same_step(graph).in_order(position))


def firing_levels(graph: Graph) -> dict[str, Level]:
    """Return the level at which each node fires, by name.

    A node that can only run once a batch is formed fires at `batch`, whatever its own level. So does an
    inference that no `keep` depends on, with all nodes after it, as a whole batch at once is cheaper. An
    exception is an inference whose model changes during the run: the graph allows it older weights.
    """
    flow = data_flow(graph)
    keeps = {node.name for node in graph.nodes if returns_keep(node)}
    written = written_models(graph)
    at_batch = set(nodes_after_batch(graph))
    for node in graph.nodes:
        later = flow.descendants(node.name)
        reads_frozen = node.spec.verb == "infer" and written.isdisjoint(node.spec.reads_weights)
        if reads_frozen and keeps.isdisjoint({node.name, *later}):
            at_batch |= {node.name, *later}
    return {node.name: Level.BATCH if node.name in at_batch else node.spec.level for node in graph.nodes}


def stages(graph: Graph) -> list[list[str]]:
    """Return node names by stage: a stage depends only on earlier stages of the same step."""
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    return [sorted(names, key=position.__getitem__) for names in same_step(graph).generations()]


def keeps_groups_whole(node: Node) -> bool:
    """Return whether a group must stay on one rank, because the body or the loss combines its samples.

    A body that receives `Sequences` may read groups, so it counts as one that does.
    """
    units = {read.unit for read in node.reads} | {returned.unit for returned in node.spec.returns}
    return (
        node.spec.level is Level.GROUP
        or Unit.GROUP in units
        or node.spec.option("reduce") == "group-mean"
        or any(read.field == "group" for read in node.reads)
        or any(kind == "sequences" for _, kind in node.spec.provided)
    )


PREFERRED = ("reward", "score")


def reported_field(graph: Graph, name: str) -> str | None:
    """Return the field that a node reports of each of its samples, or None.

    Sources and per-sample bodies report the number that `reported_number` chooses, at whatever level they
    fire. So do batch nodes whose model judges (head `score`). Other batch nodes report only `reward` or
    `score`: anything else they return, such as an advantage, is an intermediate result.
    """
    node = graph.node(name)
    field = reported_number((returned.field, returned.unit) for returned in node.spec.returns)
    return field if _judges(graph, node) or (field in PREFERRED and _returns_batch_fields(node)) else None


def reported_number(returns: Iterable[tuple[str, str]]) -> str | None:
    """Return the field `reward`, else `score`, else the first number per sample; None if there is none.

    Tensors stay on the workers; this number is what a person wants to know of a sample afterwards.
    """
    numbers = [field for field, unit in returns if unit == Unit.SEQUENCE and field != "keep"]
    return next((field for field in PREFERRED if field in numbers), next(iter(numbers), None))


def _judges(graph: Graph, node: Node) -> bool:
    spec = node.spec
    if spec.verb in ("encode", "generate") or (spec.verb == "compute" and spec.level is Level.SAMPLE):
        return True
    return spec.verb == "infer" and any(graph.model(model).head == "score" for model in spec.models)


def _returns_batch_fields(node: Node) -> bool:
    """Return whether a node returns fields of a whole batch; train and update nodes return no fields."""
    return node.spec.level is Level.BATCH and node.spec.verb not in ("train", "update")


def is_library_node(spec: NodeSpec, name: str) -> bool:
    """Return whether a node is one of `hflow.nodes.inference`, whatever its name in the recipe."""
    return (spec.body.module, spec.body.qualname) == ("hflow.nodes.inference", name)
