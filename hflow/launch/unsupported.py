"""What the language can say and the planner can plan, but this version cannot execute."""

from __future__ import annotations

from collections.abc import Iterator

from hflow.errors import NotYetError
from hflow.graph.ir import Level, Node, NodeSpec
from hflow.launch.compile import Compiled
from hflow.launch.model_metadata import model_dtype
from hflow.launch.registry import FACTORIES
from hflow.planner.ir import Plan, Replica


def refuse_unrunnable(compiled: Compiled) -> None:
    """Refuse, before anything starts, what a run could not carry through.

    Raises:
        NotYetError: naming the node or number, in one line.
    """
    for reason in _reasons(compiled):
        raise NotYetError(reason)


def _reasons(compiled: Compiled) -> Iterator[str]:
    yield from _station_reasons(compiled.plan)
    for node in compiled.graph.nodes:
        if node.spec.runs_as_compute:
            yield from _own_kind_reasons(node.spec, f"{node.spec.name} ({node.spec.where})")
        if node.spec.verb == "update":
            yield from _update_reasons(node, compiled)
        if node.spec.verb == "generate":
            yield from _engine_reasons(node, compiled)
        if node.spec.verb == "generate" and compiled.graph.stream(node.stream).parent is not None:
            yield from _derived_reasons(node, compiled)
    for replica in compiled.plan.replicas:
        yield from _backend_reasons(replica)
        yield from _layout_reasons(replica, compiled.config.workers)
    if compiled.plan.cluster.num_nodes > 1 and compiled.config.workers == "inproc":
        yield "workers=inproc is one process on one machine; take workers=ray or a cluster of one machine"


def _backend_reasons(replica: Replica) -> Iterator[str]:
    if replica.backend not in FACTORIES:
        instead = "gen.engine=embedded" if replica.role == "gen" else "backend=torch"
        yield (
            f"{replica.name} is planned for {replica.backend}, which is not executed yet; look at it with "
            f"`hflow plan`, or run it with models.{replica.model}.{instead}"
        )


def _layout_reasons(replica: Replica, workers: str) -> Iterator[str]:
    """Which layouts a backend executes."""
    if replica.backend == "megatron":
        if workers == "inproc" and replica.layout.world > 1:
            yield (
                f"{replica.name} has layout {replica.layout}: megatron needs a process for each rank; "
                f"take workers=ray, or a layout of d1"
            )
    elif replica.layout.world > replica.layout.data:
        remedy = (
            f"set models.{replica.model}.backend=megatron"
            if replica.role != "gen"
            else f"set models.{replica.model}.gen.layout=d{replica.layout.world}"
        )
        yield (
            f"{replica.name} has layout {replica.layout}: the {replica.backend} backend executes data "
            f"parallelism only; {remedy}"
        )


def _station_reasons(plan: Plan) -> Iterator[str]:
    """A model that works on what arrives takes no turns, so nobody else may use its devices."""
    engines = {replica.group: replica.name for replica in plan.replicas if replica.role == "gen"}
    turns = {group: names[0] for group, names in plan.schedule.orders}
    for node in plan.schedule.nodes:
        if node.level is Level.BATCH or node.group is None:
            continue
        if (other := engines.get(node.group) or turns.get(node.group)) is not None:
            spec, (replica, *_) = plan.graph.node(node.name).spec, plan.placement(node.name).replicas
            model = plan.replica(replica).model
            yield (
                f"{node.name} ({spec.where}): it runs as {node.level}s arrive, before a keep, so {replica} "
                f"cannot share its devices with {other}; give it devices of its own, as in "
                f"placement='... {model}=1'"
            )


def _engine_reasons(node: Node, compiled: Compiled) -> Iterator[str]:
    """An episode runs on one worker, so all of its engines must be there."""
    first, *others = (compiled.plan.replica(name) for name in compiled.plan.placement(node.name).replicas)
    for other in others:
        if other.heads != first.heads:
            yield (
                f"{node.spec.name} ({node.spec.where}): its engines lie apart, {first.name} as "
                f"{first.layout} on workers {_listed(first)}, {other.name} as {other.layout} on "
                f"{_listed(other)}; give models.{other.model}.gen the layout and group of "
                f"models.{first.model}.gen"
            )


def _update_reasons(node: Node, compiled: Compiled) -> Iterator[str]:
    """An update changes shard by shard, so its two replicas must hold the same ones."""
    at = f"{node.spec.name} ({node.spec.where})"
    target, source = (compiled.plan.replica(name) for name in compiled.plan.placement(node.name).replicas)
    if target.backend != source.backend:
        yield (
            f"{at}: {target.name} is on the {target.backend} backend, {source.name} on {source.backend}, "
            f"which cut weights each in its own way; set models.{target.model}.backend={source.backend}"
        )
    for spec in (compiled.graph.model(replica.model) for replica in (target, source)):
        dtype = model_dtype(compiled.config, compiled.graph, spec)
        if target.backend == "megatron" and dtype != "fp32":
            yield (
                f"{at}: megatron keeps the weights of {spec.name} in {dtype}, too coarse for small updates; "
                f"set models.{spec.name}.dtype=fp32, or backend=torch for both models"
            )
    if (target.layout, target.workers) != (source.layout, source.workers):
        yield (
            f"{at}: {target.name} lies as {target.layout} on workers {_listed(target)}, {source.name} as "
            f"{source.layout} on {_listed(source)}; an update needs both alike: give models.{target.model} "
            f"the layout and group of models.{source.model}"
        )


def _derived_reasons(node: Node, compiled: Compiled) -> Iterator[str]:
    """Generation beside a sample that exists happens where that is; only the root's tokens have an age."""
    spec, at = node.spec, f"{node.spec.name} ({node.spec.where})"
    root = compiled.graph.root_stream(node.stream)
    source = root.source
    if compiled.plan.placement(spec.name).replicas != compiled.plan.placement(source).replicas:
        yield f"{at}: it derives from {root.name!r}, so for now it can only use the engines of {source}"
    for other in compiled.graph.nodes:
        if other.spec.verb == "train" and other.stream in spec.streams:
            yield f"{at}: {other.name} trains on it, but samples of a derived stream have no age yet"


def _listed(replica: Replica) -> str:
    return ", ".join(map(str, replica.workers))


def _own_kind_reasons(spec: NodeSpec, at: str) -> Iterator[str]:
    """A user's kind of node has what a compute has."""
    kind = f"{at}: a kind of one's own, here {spec.verb!r},"
    if spec.opens_stream:
        yield f"{kind} cannot open a stream yet; use generate or encode"
    if spec.models:
        yield f"{kind} is not given weights yet; leave out {spec.models[0]!r}"
    for name, provided in spec.provided:
        if provided not in ("sequences", "state"):
            yield f"{kind} is not given {provided!r} yet; take out the parameter {name!r}"
