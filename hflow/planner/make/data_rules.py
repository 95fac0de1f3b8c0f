"""The data rules of a plan: what each batch node reads, and how train nodes cut their batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hflow.graph.ir import Graph, Level, Node
from hflow.graph.queries import keeps_groups_whole
from hflow.planner.plan.rows import BatchCut, EdgeRule, Placement
from hflow.types import Unit


def edge_rules(
    graph: Graph, levels: Mapping[str, Level], placements: Iterable[Placement]
) -> tuple[EdgeRule, ...]:
    """Return one rule for every batch node, and for every model that runs as samples arrive."""
    at = {placement.node: placement for placement in placements}
    return tuple(
        _rule(node, at[node.name])
        for node in graph.nodes
        if levels[node.name] is Level.BATCH or node.spec.verb == "infer"
    )


def save_rule(placement: Placement, stream: str) -> EdgeRule:
    """Return the rule of a node that saves a model: it reads no fields."""
    return EdgeRule(placement.node, stream, (), placement.heads, by_group=False, policy="balanced")


def batch_cuts(graph: Graph) -> tuple[tuple[str, BatchCut], ...]:
    """Return how each train node cuts its batch."""
    return tuple((node.name, _cut(node)) for node in graph.nodes if node.spec.verb == "train")


def _cut(node: Node) -> BatchCut:
    minibatches, epochs = node.spec.option("minibatches", 1), node.spec.option("epochs", 1)
    return BatchCut(minibatches, epochs, by_group=keeps_groups_whole(node))


def _rule(node: Node, placement: Placement) -> EdgeRule:
    fields = {f"{read.stream}/{read.field}" for read in node.reads if read.producer != node.name}
    fields |= {f"{node.stream}/{name}" for name in _required_fields(node)}
    return EdgeRule(
        consumer=node.name,
        stream=node.stream,
        fields=tuple(sorted(fields)),
        heads=placement.heads,
        by_group=keeps_groups_whole(node),
        policy="balanced" if placement.replicas else "single",
    )


def _required_fields(node: Node) -> tuple[str, ...]:
    """Return the fields of its own stream that a node needs besides those that its body reads.

    A forward pass needs the tokens. Values per token are 0 where the loss mask is 0, also in per-sample and
    per-group bodies that fire by batch, and `Sequences` holds the mask.
    """
    if any(kind == "output" for _, kind in node.spec.provided) or node.spec.verb in ("infer", "train"):
        return ("input_ids", "loss_mask")
    is_packed = node.spec.verb == "compute" and node.spec.level is Level.BATCH
    reads_tokens = any(read.unit is Unit.TOKEN for read in node.reads)
    return ("loss_mask",) if is_packed or reads_tokens else ()
