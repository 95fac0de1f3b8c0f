"""Where a model's weights lie and in which precision they are used.

Several ranks: FSDP2 shards each decoder layer and the rest (small layers together with the rest).
One rank: plain weights. In both, the weights that are stepped are fp32, and in bf16 each unit is
cast for its forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

MIN_UNIT_BYTES = 4 << 20
"""A smaller layer is gathered with the rest of the model: its own collectives would cost more time
than the memory is worth."""


def place(
    root: nn.Module,
    layers: list[nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    group: ProcessGroup | None,
) -> None:
    """Move a model to its device: sharded over `group`, or whole where that is None.

    Args:
        root: the module whose forward covers everything that uses weights.
        layers: submodules whose weights are gathered one after the other.
        device: this rank's device.
        dtype: what the forward and backward pass compute in; gradients are summed in fp32.
        group: the ranks to shard over; gradients are summed over them, not averaged.
    """
    if group is None:
        root.to(device)
        if dtype != torch.float32:
            for layer in layers:
                cast_while_running(layer, [], dtype)
            cast_while_running(root, layers, dtype)
        return
    mesh = DeviceMesh.from_group(group, device.type)
    half = dtype if dtype != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    for unit in (*(layer for layer in layers if _num_bytes(layer) >= MIN_UNIT_BYTES), root):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    root.to(device)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _num_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def cast_while_running(unit: nn.Module, inner: list[nn.Module], dtype: torch.dtype) -> None:
    """Use a unit's weights in `dtype` during its forward; gradients reach the fp32 weights.

    It is what FSDP's mixed precision does, for one rank. `inner` are units within it that have
    casts of their own. Activation checkpointing calls the unit again, and so casts again.
    """
    skipped = {id(module) for other in inner for module in other.modules()}
    slots = [
        (module, name)
        for module in unit.modules()
        if id(module) not in skipped
        for name, weight in module._parameters.items()
        if weight is not None and weight.is_floating_point()
    ]
    stack: list[list[Any]] = []

    def enter(*_: Any) -> None:
        masters = [module._parameters[name] for module, name in slots]
        casts: dict[int, Tensor] = {}
        for (module, name), master in zip(slots, masters, strict=True):
            assert master is not None
            if id(master) not in casts:  # tied weights are cast once
                casts[id(master)] = master.to(dtype)
            module._parameters[name] = casts[id(master)]  # type: ignore[assignment]
        stack.append(masters)

    def leave(*_: Any) -> None:
        for (module, name), master in zip(slots, stack.pop(), strict=True):
            module._parameters[name] = master

    unit.register_forward_pre_hook(enter)
    unit.register_forward_hook(leave, always_call=True)
