"""The phases of each device group, and what its devices hold in them."""

from __future__ import annotations

from collections.abc import Iterator

from hflow.graph.ir import Level
from hflow.planner.backends import engine_kind, training_backend
from hflow.planner.forecast import Parts, PhaseMemory
from hflow.planner.graph_queries import root_stream
from hflow.planner.ir import DeviceGroup, Plan
from hflow.planner.memory import transfer
from hflow.planner.memory.byte_counts import Items
from hflow.planner.memory.context import MemoryContext, Ranks
from hflow.planner.memory.engine_load import engine_load
from hflow.planner.memory.microbatch import largest_microbatch
from hflow.planner.memory.rank import Rank
from hflow.planner.memory.resident import GENERATE, WAKE, resident
from hflow.planner.request import PlanRequest

# -------------------- What a phase needs on a device at its peak, beside what is resident.


def transient(scene: MemoryContext, ranks: Ranks, phase: str, held: int) -> Items:
    """Bytes that a phase needs; `held` are resident."""
    items = Items()
    for rank in ranks:
        if phase == GENERATE and rank.replica.role == "gen":
            items += _generation(scene, rank, held + items.total())
        elif phase == WAKE:
            items += _transfer(scene, rank)
        elif rank.replica.name in used_replica(scene, phase):
            items += _node(scene, rank, phase)
    return items


def used_replica(scene: MemoryContext, phase: str) -> tuple[str, ...]:
    """The replica that a batch node runs on; none for computes and for phases of engines."""
    return () if phase in (GENERATE, WAKE) else scene.plan.placement(phase).replicas[:1]


def _generation(scene: MemoryContext, rank: Rank, others: int) -> Items:
    load = engine_load(scene.plan, rank, scene.lengths)
    memory = engine_kind(rank.replica.backend).memory
    step = memory.decode_step(rank, load)
    capacity = scene.plan.cluster.memory_bytes
    return Items({"KV cache": memory.cache_bytes(rank, load, capacity, others + step.total())}) + step


def _transfer(scene: MemoryContext, rank: Rank) -> Items:
    if rank.replica.role == "gen":
        route = scene.route_to(rank)
        return transfer.taking(rank, route.how) if route else Items()
    routes = scene.routes_from(rank)
    return transfer.giving(rank, routes[0].how) if routes else Items()


def _node(scene: MemoryContext, rank: Rank, name: str) -> Items:
    verb = scene.verb(name)
    if verb == "save":
        return transfer.saving(rank)
    if verb not in ("infer", "train"):
        return Items()
    node = scene.plan.graph.node(name)
    lengths = scene.lengths[root_stream(scene.plan.graph, node).name]
    batch = largest_microbatch(scene.plan, node, lengths, rank.config, rank.data)
    memory = training_backend(rank.replica.backend).memory
    return memory.train_step(rank, batch) if verb == "train" else memory.infer_step(rank, batch)


def memory_phases(plan: Plan, request: PlanRequest) -> tuple[PhaseMemory, ...]:
    """Bytes on every device in every phase of its group's step; devices with the same bytes share a row.

    Models whose sizes are unknown are left out, and so are the nodes that run on them. The last data ranks,
    which hold less where a number of rows does not divide, count as much as the first.

    Raises:
        PlanError: when the assumed prompt leaves no room for a response.
    """
    scene = MemoryContext(plan, request)
    return tuple(row for group in plan.groups for row in _rows(scene, group))


def unknown_models(plan: Plan) -> tuple[str, ...]:
    """Models whose sizes the planner does not know, so that their memory is left out."""
    known = dict(plan.shapes)
    return tuple(dict.fromkeys(r.model for r in plan.replicas if r.model not in known))


def _rows(scene: MemoryContext, group: DeviceGroup) -> Iterator[PhaseMemory]:
    seats = scene.seats(group)
    for phase, gathered in _phases(scene, group):
        alike: dict[tuple[Parts, Parts], list[int]] = {}
        for ranks, seated in seats:
            stays = resident(scene, ranks, phase, gathered)
            passes = transient(scene, ranks, phase, stays.total())
            parts = tuple(stays.items()), tuple(passes.items())
            alike.setdefault(parts, []).extend(seated)
        for parts, devices in alike.items():
            yield PhaseMemory(group.name, tuple(sorted(devices)), phase, *parts)


def _phases(scene: MemoryContext, group: DeviceGroup) -> Iterator[tuple[str, frozenset[str]]]:
    """Each phase of a group's step, and the other replicas that an inference left gathered.

    The step is gone through twice, as what its end leaves is there at the next one's beginning.
    """
    names = _phase_names(scene, group)
    gathered: frozenset[str] = frozenset()
    for is_second in (False, True):
        for phase in names:
            used = frozenset(used_replica(scene, phase))
            if is_second:
                yield phase, gathered - used
            if used and scene.verb(phase) == "infer":
                gathered |= used
            elif used and scene.verb(phase) == "train":
                gathered -= used


def _phase_names(scene: MemoryContext, group: DeviceGroup) -> list[str]:
    plan, unknown = scene.plan, unknown_models(scene.plan)
    known = {r.name: r for r in plan.replicas if r.group == group.name and r.model not in unknown}
    generates = any(replica.role == "gen" for replica in known.values())
    sends = any(route.src in known and route.how == "pull" for route in plan.weights)
    arrivals = [n.name for n in plan.schedule.nodes if n.level is not Level.BATCH and n.group == group.name]
    nodes = (*arrivals, *dict(plan.schedule.orders).get(group.name, ()))
    return [
        *([GENERATE] if generates else []),
        *([WAKE] if generates or sends else []),
        *(node for node in nodes if all(name in known for name in used_replica(scene, node))),
    ]
