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
_STATES = ItemKey(MemoryCategory.OPTIMIZER.value, MemoryCategory.OPTIMIZER)
"""The optimizer's states among the items of a model."""
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
    away, on_host = _OFFLOADED[rank.config.offload] - _USED[use], _only_on_host(rank)
    return Items(
        {key: size for key, size in state.items() if key.category not in away and key not in on_host}
    )


def in_host_memory(rank: Rank) -> Items:
    """Return the host memory of a rank's offloaded state. It is kept while the state is on the device.

    The states of an optimizer that steps on the host are only there.
    """
    items = _offloaded(rank) + Items({_there(key): size for key, size in _only_on_host(rank).items()})
    if _steps_on_host(rank):
        num_bytes = STEP_BUFFERS * rank.num_optimizers
        items += item(MemoryCategory.OPTIMIZER, num_bytes, "buffers of updates in host memory")
    return items


def moved_bytes(rank: Rank, use: Use, *, changes: bool) -> int:
    """Return the bytes that one use of a training or inference model copies between device and host.

    If values change, they are copied back afterwards.
    """
    needed = sum(size for key, size in _offloaded(rank).items() if key.category in _USED[use])
    return needed * (2 if changes else 1)


def _offloaded(rank: Rank) -> Items:
    """Return the items that move between device and host.

    Gradients have no values between steps, so they are freed and not copied.
    """
    if rank.config.offload == "none":
        return Items()
    kept, on_host = _OFFLOADED[rank.config.offload] - {MemoryCategory.GRADIENTS}, _only_on_host(rank)
    return Items(
        {
            _there(key): size
            for key, size in _state(rank).items()
            if key.category in kept and key not in on_host
        }
    )


def _only_on_host(rank: Rank) -> Items:
    """Return the states of an optimizer that steps on the host. Weights in fp32 are on the device."""
    return Items({_STATES: _state(rank)[_STATES]} if _steps_on_host(rank) else {})


def _state(rank: Rank) -> Items:
    return training_backend(rank.replica.backend).memory.model_state(rank)


def _there(key: ItemKey) -> ItemKey:
    return ItemKey(f"{key.name} in host memory", key.category)


def _steps_on_host(rank: Rank) -> bool:
    """Return whether a rank's optimizer has its states in the memory of a GPU's host."""
    is_trained = rank.replica.role == "train"
    return is_trained and not rank.on_cpu and optimizer_traits(rank.config.optim.name).is_on_host
