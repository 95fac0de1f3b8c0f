"""What the ranks on a device keep whatever runs, by the names of their replicas."""

from __future__ import annotations

from collections.abc import Container

from hflow.planner.hardware import GIB
from hflow.planner.memory import engine, torch_steps
from hflow.planner.memory.byte_counts import Items
from hflow.planner.memory.context import MemoryContext, Ranks
from hflow.planner.memory.rank import Rank

# -------------------- What a replica keeps on its devices between phases: weights, optimizer state,
# gradients.


FP32 = 4
NUM_MOMENTS = 2
"""AdamW keeps the running means of the gradient and of its square, in fp32."""


def model_state(rank: Rank) -> Items:
    """Bytes that a rank of a training engine keeps.

    torch: fp32 weights and moments, sharded over data; gradients live within a step only. Sixteen bytes a
    trained parameter over the ranks, with the gradients. megatron: weights in the compute dtype and fp32
    gradients whole; fp32 weights (in bf16) and moments sharded: 6 + 12 / d bytes in bf16. An inference
    replica has weights alone.
    """
    facts, sizes = rank.facts, rank.sizes
    is_trained = rank.replica.role == "train"
    if facts.over_data == "everything":
        moments = NUM_MOMENTS * FP32 * sizes.shard if is_trained else 0
        return Items(weights=FP32 * sizes.shard) + Items(optimizer=moments)
    weights = Items(weights=rank.width * sizes.whole)
    if not is_trained:
        return weights
    num_copies = NUM_MOMENTS + (1 if facts.keeps_cast and rank.width < FP32 else 0)
    optimizer = -(-num_copies * FP32 * sizes.whole // rank.data)
    return weights + Items(gradients=FP32 * sizes.whole, optimizer=optimizer)


GENERATE, WAKE = "generate", "wake"
"""Phases in which engines are awake."""


def resident(scene: MemoryContext, ranks: Ranks, phase: str, gathered: Container[str]) -> Items:
    """Bytes that stay on a device in one phase.

    Args:
        scene: the plan.
        ranks: those on the device.
        phase: `generate`, `wake` or a batch node.
        gathered: replicas that an inference left gathered.
    """
    items = Items()
    for rank in ranks:
        name = rank.replica.name
        held = _engine(scene, rank, phase) if rank.replica.role == "gen" else model_state(rank)
        if name in gathered and rank.replica.backend == "torch":
            held["gathered weights"] = torch_steps.left_gathered(rank)
        items += Items({f"{name} {what}": size for what, size in held.items()})
    hardware = scene.request.hardware
    return items + Items(runtime=round(hardware.device.overhead_gib * GIB) if hardware else 0)


def _engine(scene: MemoryContext, rank: Rank, phase: str) -> Items:
    """An engine's weights, and its cache between turns.

    While it sleeps, the embedded engine keeps both on a CPU; engines leave an accelerator to others.
    """
    is_asleep = phase not in (GENERATE, WAKE)
    if is_asleep and not rank.on_cpu:
        return Items()
    suffix = " (asleep)" if is_asleep else ""
    held = Items()
    if not _shares(scene, rank):
        held["weights" + suffix] = engine.weights(rank)
    if rank.on_cpu and phase != GENERATE:
        load = engine.engine_load(scene.plan, rank, scene.lengths)
        held["KV cache" + suffix] = engine.cache(rank, load, room=0)
    return held


def _shares(scene: MemoryContext, rank: Rank) -> bool:
    """Whether an engine uses its trainer's storage: whole fp32 weights of a language model."""
    route = scene.route_to(rank)
    return route is not None and route.how == "shared" and rank.asked.dtype == "fp32"
