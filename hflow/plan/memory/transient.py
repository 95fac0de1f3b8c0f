"""What a phase needs on a device at its peak, beside what is resident."""

from __future__ import annotations

from hflow.plan.memory import engine, megatron_steps, torch_steps, transfer
from hflow.plan.memory.items import Items
from hflow.plan.memory.microbatch import largest_microbatch
from hflow.plan.memory.rank import Rank
from hflow.plan.memory.resident import GENERATE, WAKE
from hflow.plan.memory.scene import Ranks, Scene
from hflow.plan.order import root_stream


def transient(scene: Scene, ranks: Ranks, phase: str, held: int) -> Items:
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


def used_replica(scene: Scene, phase: str) -> tuple[str, ...]:
    """The replica that a batch node runs on; none for computes and for phases of engines."""
    return () if phase in (GENERATE, WAKE) else scene.plan.placement(phase).replicas[:1]


def _generation(scene: Scene, rank: Rank, others: int) -> Items:
    load = engine.engine_load(scene.plan, rank, scene.lengths)
    step = engine.step(rank, load)
    room = round(engine.VLLM_BUDGET * scene.plan.cluster.memory_bytes) - others - step.total()
    return Items({"KV cache": engine.cache(rank, load, room)}) + step


def _transfer(scene: Scene, rank: Rank) -> Items:
    if rank.replica.role == "gen":
        route = scene.route_to(rank)
        return transfer.taking(rank, route.how) if route else Items()
    routes = scene.routes_from(rank)
    return transfer.giving(rank, routes[0].how) if routes else Items()


def _node(scene: Scene, rank: Rank, name: str) -> Items:
    verb = scene.verb(name)
    if verb == "save":
        return transfer.saving(rank)
    if verb not in ("infer", "train"):
        return Items()
    node = scene.plan.graph.node(name)
    lengths = scene.lengths[root_stream(scene.plan.graph, node).name]
    batch = largest_microbatch(scene.plan, node, lengths, rank.asked, rank.data)
    is_torch = rank.replica.backend == "torch"
    if verb == "train":
        return torch_steps.training(rank, batch) if is_torch else megatron_steps.training(rank, batch)
    return torch_steps.inference(rank, batch) if is_torch else megatron_steps.inference(rank, batch)
