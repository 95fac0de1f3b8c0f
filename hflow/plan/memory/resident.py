"""What the ranks on a device keep whatever runs, by the names of their replicas."""

from __future__ import annotations

from collections.abc import Container

from hflow.plan.hardware import GIB
from hflow.plan.memory import engine, torch_steps
from hflow.plan.memory.items import Items
from hflow.plan.memory.model_state import model_state
from hflow.plan.memory.rank import Rank
from hflow.plan.memory.scene import Ranks, Scene

GENERATE, WAKE = "generate", "wake"
"""Phases in which engines are awake."""


def resident(scene: Scene, ranks: Ranks, phase: str, gathered: Container[str]) -> Items:
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


def _engine(scene: Scene, rank: Rank, phase: str) -> Items:
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


def _shares(scene: Scene, rank: Rank) -> bool:
    """Whether an engine uses its trainer's storage: whole fp32 weights of a language model."""
    route = scene.route_to(rank)
    return route is not None and route.how == "shared" and rank.asked.dtype == "fp32"
