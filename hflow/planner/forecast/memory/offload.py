"""Offloading (`models.NAME.offload`): which bytes of a model are in host memory, and when they move."""

from __future__ import annotations

from typing import Literal

from hflow.config.schema import Offload
from hflow.planner.forecast.memory.parts import ItemKey, Items, item
from hflow.planner.forecast.memory.rank import FP32_BYTES, Rank
from hflow.planner.models.descriptors import training_backend
from hflow.planner.plan.forecast import MemoryCategory
from hflow.planner.plan.optimizers import CHUNK, optimizer_traits

STEP_BUFFERS = 4 * FP32_BYTES * CHUNK
"""Bytes of the host for two chunks of weights and gradients that it updates
(`training/optimizers/adamw_cpu/optimizer.py`)."""
Use = Literal["nothing", "weights", "everything"]
"""What a phase needs of a model: an infer node its weights, a train node the optimizer's state too."""

_OFFLOADED: dict[Offload, frozenset[MemoryCategory]] = {
    "none": frozenset(),
    "optimizer": frozenset({MemoryCategory.OPTIMIZER, MemoryCategory.GRADIENTS}),
    "all": frozenset({MemoryCategory.WEIGHTS, MemoryCategory.OPTIMIZER, MemoryCategory.GRADIENTS}),
}
_USED: dict[Use, frozenset[MemoryCategory]] = {
    "nothing": frozenset(),
    "weights": frozenset({MemoryCategory.WEIGHTS}),
    "everything": frozenset(MemoryCategory),
}


def on_device(rank: Rank, state: Items, use: Use) -> Items:
    """Return the items of a model's state that are on a device in a phase that needs some of it."""
    away = _OFFLOADED[rank.config.offload] - _USED[use]
    if _steps_on_host(rank):
        away |= {MemoryCategory.OPTIMIZER}
    return Items({key: size for key, size in state.items() if key.category not in away})


def in_host_memory(rank: Rank) -> Items:
    """Return the host memory of a rank's offloaded state. It is kept while the state is on the device.

    The states of an optimizer that steps on the host are only there.

    Gradients have no values between steps, so they are freed and not copied.
    """
    is_stepped = _steps_on_host(rank)
    if rank.config.offload == "none" and not is_stepped:
        return Items()
    state = training_backend(rank.replica.backend).memory.model_state(rank)
    kept = _OFFLOADED[rank.config.offload] - {MemoryCategory.GRADIENTS}
    kept |= {MemoryCategory.OPTIMIZER} if is_stepped else set()
    size = STEP_BUFFERS if is_stepped else 0
    buffers = item(MemoryCategory.OPTIMIZER, size, "buffers of updates in host memory")
    return buffers + Items(
        {
            ItemKey(f"{key.name} in host memory", key.category): size
            for key, size in state.items()
            if key.category in kept
        }
    )


def moved_bytes(rank: Rank, use: Use, *, changes: bool) -> int:
    """Return the bytes that one use of a model copies between device and host.

    Args:
        rank: a rank of a training or inference replica.
        use: the part of the state that is needed.
        changes: whether values change, so that they are copied back afterwards.
    """
    used = _USED[use] - ({MemoryCategory.OPTIMIZER} if _steps_on_host(rank) else set())
    needed = sum(size for key, size in in_host_memory(rank).items() if key.category in used)
    return needed * (2 if changes else 1)


def _steps_on_host(rank: Rank) -> bool:
    """Return whether a rank's optimizer has its states in the memory of a GPU's host."""
    is_trained = rank.replica.role == "train"
    return is_trained and not rank.on_cpu and optimizer_traits(rank.config.optim.name).is_on_host
