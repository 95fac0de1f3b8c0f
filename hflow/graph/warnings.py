"""Warnings about graphs that are allowed but seldom intended."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hflow.graph.errors import format_problem
from hflow.graph.ir import Graph, Level, Node, RecipeSpec
from hflow.types import Unit

_REWARD = re.compile(r"(^|_)(reward|score)(_|$)")


def warnings_of(graph: Graph, spec: RecipeSpec) -> Iterator[str]:
    """Yield the lines to print after a successful check."""
    for name, where in spec.unlisted:
        yield format_problem(where, name, "no recipe in this file lists the node")
    for node in graph.nodes:
        yield from _unused(graph, node)
        yield from _widened(node)
        yield from _truncated(graph, node)


def _unused(graph: Graph, node: Node) -> Iterator[str]:
    """Warn of fields that no node reads. One number per sample or group is logged, which counts as read."""
    if node.spec.verb == "train":
        return
    for result in node.spec.returns:
        is_logged = node.spec.level is not Level.BATCH and result.unit in (Unit.SEQUENCE, Unit.GROUP)
        is_read = any(
            r.producer == node.name and r.field == result.field for n in graph.nodes for r in n.reads
        )
        if not is_logged and not is_read:
            yield format_problem(node.spec.where, node.name, f"no node reads {result.field!r}")


def _widened(node: Node) -> Iterator[str]:
    """Warn of a reward per sequence that is read per token, so that every token receives all of it."""
    for read in node.reads:
        repeated = read.source_unit is not Unit.TOKEN and read.unit is Unit.TOKEN
        if repeated and _REWARD.search(read.field):
            fix = f"To reward the last token only, use seqs.at_end({read.field})"
            problem = f"{read.field!r} is repeated on every token. {fix}"
            yield format_problem(node.spec.where, node.name, problem, read.parameter)


def _truncated(graph: Graph, node: Node) -> Iterator[str]:
    """Warn of behav_logprobs from a truncated distribution, which differ from the model's."""
    if not any(read.field == "behav_logprobs" for read in node.reads):
        return
    source = graph.node(graph.stream(node.stream).source).spec
    if source.option("top_p", 1.0) < 1 or source.option("top_k", 0) > 0:
        problem = (
            f"{source.name} samples with top_p or top_k: behav_logprobs are not comparable with the model's"
        )
        yield format_problem(node.spec.where, node.name, problem, "behav_logprobs")
