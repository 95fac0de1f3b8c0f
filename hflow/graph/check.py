"""What a graph must not be. Every check is one function; the first refusal is raised."""

from __future__ import annotations

import re
from collections.abc import Mapping

import networkx as nx

from hflow.graph.edges import nodes_after_batch, same_step_order
from hflow.graph.errors import recipe_error
from hflow.graph.field_table import UNIT_NAMES
from hflow.graph.ir import EdgeKind, Graph, Level, Node
from hflow.types import Unit

REDUCTIONS: Mapping[Unit, tuple[str, ...]] = {
    Unit.TOKEN: ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum/N"),
    Unit.SEQUENCE: ("seq-mean",),
    Unit.GROUP: ("group-mean",),
}
"""Unit of a loss -> how it may be reduced; N is a whole number."""


def check_graph(graph: Graph) -> None:
    """Raise `RecipeError` for the first thing that the language forbids."""
    check_writers(graph)
    check_losses(graph)
    check_cycles(graph)
    for node in graph.nodes:
        check_group(graph, node)
        check_keep(graph, node)
        check_arrival(node)
        check_cadence(graph, node)
        check_source(graph, node)


def check_writers(graph: Graph) -> None:
    """A model is written by one node, and only if it is trainable."""
    writers: dict[str, Node] = {}
    for node in graph.nodes:
        for name in node.spec.writes_weights:
            model = graph.model(name)
            if not model.trainable:
                text = f"it writes model {name!r}, which is frozen: declare Model({name!r}, trainable=True)"
                raise _fault(node, f"{text} at {model.where}" if model.where else text)
            other = writers.setdefault(name, node)
            if other is not node:
                raise _fault(node, f"{other.name} at {other.spec.where} also writes model {name!r} in a step")


def check_losses(graph: Graph) -> None:
    """A loss has a reduction of its unit, and is taken over the batches that make the steps."""
    for node in graph.nodes:
        if node.spec.verb != "train":
            continue
        unit, reduce = node.spec.returns[0].unit, node.spec.option("reduce")
        choices = REDUCTIONS[unit]
        counted = unit is Unit.TOKEN and re.fullmatch(r"token-sum/[1-9]\d*", reduce or "")
        if not counted and (reduce not in choices or reduce == "token-sum/N"):
            asked = "it has no reduce=" if reduce is None else f"reduce={reduce!r} does not fit"
            raise _fault(node, f"{asked}: a {UNIT_NAMES[unit]} loss is reduced by {' or '.join(choices)}")
        if not graph.stream(node.stream).trained:
            raise _fault(node, f"{graph.dataset!r} does not feed stream {node.stream!r}: it makes no steps")


def check_cycles(graph: Graph) -> None:
    """Within a step nothing waits for itself."""
    for node in graph.nodes:
        own = [r for r in node.reads if r.producer == node.name and r.field in _returned(node)]
        if own:
            raise _fault(node, f"a cycle within a step: it reads {own[0].field!r}, which it returns itself")
    order = same_step_order(graph.edges)
    if nx.is_directed_acyclic_graph(order):
        return
    arcs = nx.find_cycle(order)
    path = " -> ".join([src for src, _ in arcs] + [arcs[0][0]])
    why = ", ".join(_arc_reason(graph, src, dst) for src, dst in arcs)
    raise _fault(graph.node(arcs[0][0]), f"a cycle within a step: {path} ({why})")


def check_group(graph: Graph, node: Node) -> None:
    """Who needs several samples of a prompt works on a stream that has them."""
    needed = node.spec.option("min_group", 1)
    group = graph.stream(node.stream).group
    if group < needed:
        source = graph.stream(node.stream).source
        raise _fault(
            node,
            f"it needs groups of {needed} or more, but {source} makes groups of {group}: "
            f"set group={max(needed, 2)} there, or min_group={group} here",
        )


def check_keep(graph: Graph, node: Node) -> None:
    """`keep` is a bool of a sample or group, decided before a batch is formed."""
    result = next((r for r in node.spec.returns if r.field == "keep"), None)
    if result is None:
        return
    if node.spec.level is Level.BATCH:
        raise _fault(node, "'keep' refuses a sample or group: say per='sample' or per='group'")
    if result.scalar != "bool":
        raise _fault(node, f"'keep' must be a bool, not {result.scalar}")
    late = nodes_after_batch(graph)
    if node.name in late:
        before = [
            e.src for e in graph.edges if e.dst == node.name and e.kind is EdgeKind.DATA and e.src in late
        ]
        reason = f"depends on {before[0]}, which runs" if before else "has a cadence, so it runs"
        raise _fault(
            node, f"'keep' {reason} only after the batch is formed, when nothing can be refused any more"
        )


def check_arrival(node: Node) -> None:
    """A model that works on single samples as they arrive sees no groups."""
    if node.spec.verb != "infer" or node.spec.level is not Level.SAMPLE:
        return
    units = {read.unit for read in node.reads} | {returned.unit for returned in node.spec.returns}
    sees_groups = any(kind == "sequences" for _, kind in node.spec.provided) or any(
        read.field == "group" for read in node.reads
    )
    if sees_groups or Unit.GROUP in units:
        raise _fault(node, "it sees groups, whose members come one by one: say per='group'")


def check_cadence(graph: Graph, node: Node) -> None:
    """A field is there in every step in which it is read; the trained stream has no cadence."""
    spec = node.spec
    if spec.opens_stream and graph.stream(node.stream).trained and (spec.every, spec.after) != (1, 0):
        raise _fault(
            node, "the recipe's dataset makes the steps: every= and after= are for evaluation (data=)"
        )
    for read in node.reads:
        maker = graph.node(read.producer).spec
        if maker.opens_stream or maker.name == spec.name:
            continue
        if spec.every % maker.every or spec.after < maker.after or (spec.after - maker.after) % maker.every:
            made = f"{maker.name} makes {read.field!r} every {maker.every} steps from step {maker.after}"
            text = f"{made}, but it is read every {spec.every} from step {spec.after}"
            raise recipe_error(spec.where, spec.name, text, read.parameter)


def check_source(graph: Graph, node: Node) -> None:
    """Episodes need language models; what is trained on must have been drawn at random."""
    if node.spec.verb != "generate":
        return
    for name in node.spec.models:
        if graph.model(name).head != "lm":
            raise _fault(
                node, f"model {name!r} has head={graph.model(name).head!r}; generation needs head='lm'"
            )
    learners = [n for n in graph.nodes if n.spec.verb == "train" and n.stream in node.spec.streams]
    if learners and node.spec.option("temperature") == 0:
        raise _fault(node, f"{learners[0].name} trains on it, so its temperature must be above 0")


def _returned(node: Node) -> list[str]:
    return [result.field for result in node.spec.returns]


def _arc_reason(graph: Graph, src: str, dst: str) -> str:
    edge = next(e for e in graph.edges if (e.src, e.dst) == (src, dst) and e.lag == 0)
    if edge.kind is EdgeKind.DATA:
        return f"{dst} reads {', '.join(map(repr, edge.fields))}"
    return f"{dst} overwrites {edge.model!r} that {src} reads"


def _fault(node: Node, text: str) -> Exception:
    return recipe_error(node.spec.where, node.name, text)
