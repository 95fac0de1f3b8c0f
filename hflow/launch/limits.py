"""What the language can say and the planner can plan, but this version cannot execute."""

from __future__ import annotations

from collections.abc import Iterator

from hflow.errors import NotYetError
from hflow.graph.ir import Level, Node, NodeSpec
from hflow.launch.compiled import Compiled


def refuse_unrunnable(compiled: Compiled) -> None:
    """Refuse, before anything starts, what a run could not carry through.

    Raises:
        NotYetError: naming the node or number, in one line.
    """
    for reason in _reasons(compiled):
        raise NotYetError(reason)


def _reasons(compiled: Compiled) -> Iterator[str]:
    levels = {node.name: node.level for node in compiled.plan.schedule.nodes}
    for node in compiled.graph.nodes:
        yield from _node_reasons(node, levels.get(node.name, Level.SAMPLE))
    for replica in compiled.plan.replicas:
        if replica.layout.world > replica.layout.data:
            yield (
                f"{replica.name} has layout {replica.layout}: the {replica.backend} backend executes data "
                f"parallelism only; plan it with `hflow plan`, or run it with a layout of "
                f"d{replica.layout.world}"
            )
    if compiled.config.max_staleness > 0:
        yield "max_staleness above 0 is planned but not executed yet; set max_staleness=0"
    if compiled.plan.cluster.num_nodes > 1 and compiled.config.workers == "inproc":
        yield "workers=inproc is one process on one machine; take workers=ray or a cluster of one machine"


def _node_reasons(node: Node, level: Level) -> Iterator[str]:
    spec = node.spec
    at = f"{spec.name} ({spec.where})"
    if spec.verb == "update":
        yield f"{at}: the verb 'update' is checked and planned but not executed yet"
    if spec.verb == "generate" and len(spec.models) > 1:
        yield f"{at}: one generate node with several engines is not executed yet; use one engine"
    if any(kind == "state" for _, kind in spec.provided):
        yield f"{at}: node state is not executed yet; take out the State parameter"
    if spec.runs_as_compute:
        yield from _own_kind_reasons(spec, at)
    if spec.verb == "infer" and level is not Level.BATCH:
        yield f'{at}: an infer as groups arrive is not executed yet; leave out per="group"'


def _own_kind_reasons(spec: NodeSpec, at: str) -> Iterator[str]:
    """A user's kind of node has what a compute has."""
    kind = f"{at}: a kind of one's own, here {spec.verb!r},"
    if spec.opens_stream:
        yield f"{kind} cannot open a stream yet; use generate or encode"
    if spec.models:
        yield f"{kind} is not given weights yet; leave out {spec.models[0]!r}"
    for name, provided in spec.provided:
        if provided != "sequences":
            yield f"{kind} is not given {provided!r} yet; take out the parameter {name!r}"
