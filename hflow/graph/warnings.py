"""What a graph may be but is seldom meant to be."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hflow.graph.errors import format_problem
from hflow.graph.ir import Graph, Level, Node, RecipeSpec
from hflow.types import Unit

_REWARD = re.compile(r"(^|_)(reward|score)(_|$)")


def warnings_of(graph: Graph, spec: RecipeSpec) -> Iterator[str]:
    """Lines to print after a successful check."""
    for name, where in spec.unlisted:
        yield format_problem(where, name, "no recipe lists this node")
    for node in graph.nodes:
        yield from _unused(graph, node)
        yield from _widened(node)
        yield from _truncated(graph, node)


def _unused(graph: Graph, node: Node) -> Iterator[str]:
    """Fields that nobody reads. One number a sample or group is logged, which is a use."""
    if node.spec.verb == "train":
        return
    for result in node.spec.returns:
        is_logged = node.spec.level is not Level.BATCH and result.unit in (Unit.SEQUENCE, Unit.GROUP)
        is_read = any(
            r.producer == node.name and r.field == result.field for n in graph.nodes for r in n.reads
        )
        if not is_logged and not is_read:
            yield format_problem(node.spec.where, node.name, f"nobody reads {result.field!r}")


def _widened(node: Node) -> Iterator[str]:
    """Rewards of a sequence that would be paid at every one of its tokens."""
    for read in node.reads:
        repeated = read.source_unit is not Unit.TOKEN and read.unit is Unit.TOKEN
        if repeated and _REWARD.search(read.field):
            text = (
                f"{read.field!r} is repeated on every token; a terminal reward is seqs.at_end({read.field})"
            )
            yield format_problem(node.spec.where, node.name, text, read.parameter)


def _truncated(graph: Graph, node: Node) -> Iterator[str]:
    """Log-probs of a truncated distribution, compared with those of the whole one."""
    if not any(read.field == "behav_logprobs" for read in node.reads):
        return
    source = graph.node(graph.stream(node.stream).source).spec
    if source.option("top_p", 1.0) < 1 or source.option("top_k", 0) > 0:
        text = f"{source.name} samples with top_p or top_k, so behav_logprobs do not compare with the model's"
        yield format_problem(node.spec.where, node.name, text, "behav_logprobs")
