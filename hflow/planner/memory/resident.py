"""What the ranks on a device keep whatever runs, by the names of their replicas."""

from __future__ import annotations

from collections.abc import Container

from hflow.planner.backends import engine_kind, training_backend
from hflow.planner.hardware import GIB
from hflow.planner.memory.byte_counts import Items
from hflow.planner.memory.context import MemoryContext, Ranks
from hflow.planner.memory.engine_load import engine_load, engine_weights
from hflow.planner.memory.rank import Rank

GENERATE, WAKE = "generate", "wake"
"""Phases in which engines are awake."""


def resident(scene: MemoryContext, ranks: Ranks, phase: str, inferred: Container[str]) -> Items:
    """Bytes that stay on a device in one phase.

    Args:
        scene: the plan.
        ranks: those on the device.
        phase: `generate`, `wake` or a batch node.
        inferred: replicas whose last batch node was an inference.
    """
    items = Items()
    for rank in ranks:
        name = rank.replica.name
        if rank.replica.role == "gen":
            held = _engine(scene, rank, phase)
        else:
            memory = training_backend(rank.replica.backend).memory
            held = memory.model_state(rank)
            if name in inferred:
                held += memory.kept_after_infer(rank)
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
        held["weights" + suffix] = engine_weights(rank)
    if rank.on_cpu and phase != GENERATE:
        load = engine_load(scene.plan, rank, scene.lengths)
        held["KV cache" + suffix] = engine_kind(rank.replica.backend).memory.cache_bytes(
            rank, load, capacity=0, used=0
        )
    return held


def _shares(scene: MemoryContext, rank: Rank) -> bool:
    """Whether an engine uses its trainer's storage: whole fp32 weights of a language model."""
    route = scene.route_to(rank)
    return route is not None and route.how == "shared" and rank.config.compute_dtype == "fp32"
