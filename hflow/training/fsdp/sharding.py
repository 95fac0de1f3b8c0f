"""Placement of a model's weights on devices, and the dtype in which they are used.

With several ranks, FSDP2 shards each decoder layer, and the rest of the model together with small layers.
With a replicate axis (HSDP) it shards them over neighbours, and other ranks hold the same shards.
With one rank, weights stay whole. In both cases the stored weights are fp32; a bf16 model casts each unit for
its forward and backward pass. Beside adapters, the weights that are not trained are stored in bf16 already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from hflow.shapes.layout import Layout
from hflow.training.fsdp.shard_collectives import use_messages
from hflow.training.rank_groups import RankGroups, existing_groups

MIN_UNIT_BYTES = 4 << 20
"""A layer with fewer bytes in fp32 is gathered with the rest of the model: collectives of its own would cost
more time than the saved memory is worth."""


def place_model(
    root: nn.Module,
    layers: list[nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    group: ProcessGroup | None,
    layout: Layout,
    fill: Callable[[], None],
) -> None:
    """Move a model to its device, sharded over `group`.

    Args:
        root: the module whose forward covers every use of weights. If it is sharded, parameters may be on
            the meta device; their values are undefined then.
        layers: submodules whose weights are gathered one after the other.
        dtype: dtype of the forward and backward pass. Gradients are summed in fp32.
        group: the ranks to shard over; None leaves the weights whole. Gradients are summed over the ranks,
            not averaged.
        fill: puts weights that exist already in the place of those on the meta device, before these get
            memory. They are sharded in the same way. A rank whose last block of rows is short copies it.
    """
    if group is None:
        fill()
        root.to(device)
        if dtype != torch.float32:
            for layer in layers:
                cast_while_running(layer, [], dtype)
            cast_while_running(root, layers, dtype)
        return
    mesh = _make_mesh(group, layout, device.type)
    half = dtype if dtype != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    for unit in (*(layer for layer in layers if _num_bytes(layer) >= MIN_UNIT_BYTES), root):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fill()
    root._apply(lambda tensor: _on_device(tensor, device))
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            use_messages(module, group)


def _make_mesh(group: ProcessGroup, layout: Layout, device: str) -> DeviceMesh:
    """Return the mesh of a group: `[shard]`, or `[replicate, shard]` with a replicate axis; a collective."""
    # DTensor caches results of operations by the ranks and names of a mesh, the mesh included, and looks for
    # groups by name. In a process that served another run, the group of these ranks had another name.
    if layout.replicate == 1:
        return DeviceMesh.from_group(group, device, mesh_dim_names=(group.group_name,))
    _known_meshes[:] = [known for known in _known_meshes if known[0] in existing_groups()]
    for known, size, mesh in _known_meshes:
        if known is group and size == layout.replicate:
            return mesh
    made, rank = RankGroups(group), group.rank()
    groups = [made.of(layout.replicate_ranks(rank)), made.of(layout.fsdp_ranks(rank))]
    ranks, size = dist.get_process_group_ranks(group), layout.fsdp_size
    sets = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    names = tuple(one.group_name for one in groups)
    mesh = DeviceMesh.from_group(groups, device, mesh=sets, mesh_dim_names=names)
    _known_meshes.append((group, layout.replicate, mesh))
    return mesh


_known_meshes: list[tuple[ProcessGroup, int, DeviceMesh]] = []
"""The meshes of this process with a replicate axis, each with its ranks and the size of the axis. Models with
the same ranks share their groups, as each one has buffers on the device."""


@contextmanager
def kept_after_forward(root: nn.Module, zero_stage: int) -> Iterator[None]:
    """Have forward passes leave layers gathered while the context is open, below ZeRO stage 3."""
    layers = [unit for unit in root.modules() if isinstance(unit, FSDPModule) and unit is not root]
    try:
        for layer in layers if zero_stage < 3 else ():
            layer.set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for layer in layers if zero_stage < 3 else ():
            layer.set_reshard_after_forward(True, recurse=False)


def set_collectives(root: nn.Module, zero_stage: int, *, is_last: bool) -> None:
    """Choose what the next backward pass exchanges: the last one of a minibatch, or one before it.

    Below ZeRO stage 3 weights stay gathered until the last one. At stage 1 whole gradients are summed on each
    rank, in fp32, and over ranks in the last one. Sums over a replicate axis always wait for that.
    """
    assert isinstance(root, FSDPModule), "only a sharded model exchanges anything"
    root.set_reshard_after_backward(is_last or zero_stage == 3)
    root.set_requires_gradient_sync(is_last or zero_stage > 1)
    root.set_requires_all_reduce(is_last)


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; one on the meta device is not initialised there."""
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def _num_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's weights in fp32."""
    return 4 * sum(weight.numel() for weight in module.parameters())


def recompute_layers(layers: Iterable[nn.Module]) -> None:
    """Keep only the inputs of layers for their backward pass, and compute the rest again.

    Everything that a layer's `forward` does when this is called is computed again, its casts too. Hooks of
    the layer do not run again: by then FSDP has gathered the weights.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def cast_while_running(unit: nn.Module, inner: list[nn.Module], dtype: torch.dtype) -> None:
    """Use a unit's weights in `dtype` during its forward; gradients reach the fp32 weights.

    This is FSDP's mixed precision for a single rank. The submodules `inner` cast their own weights.
    """
    skipped = {id(module) for submodule in inner for module in submodule.modules()}
    slots = [
        (module, name)
        for module in unit.modules()
        if id(module) not in skipped
        for name, weight in module._parameters.items()
        if weight is not None and weight.is_floating_point()
    ]
    unit.forward = partial(_run_cast, unit.forward, slots, dtype)


def _run_cast(
    forward: Callable[..., Any],
    slots: list[tuple[nn.Module, str]],
    dtype: torch.dtype,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a forward with the parameters in `slots` cast; tied ones are cast once."""
    originals = [module._parameters[name] for module, name in slots]
    casts: dict[int, Tensor] = {}
    for (module, name), original in zip(slots, originals, strict=True):
        assert original is not None
        if id(original) not in casts:
            casts[id(original)] = original.to(dtype)
        module._parameters[name] = casts[id(original)]  # type: ignore[assignment]
    try:
        return forward(*args, **kwargs)
    finally:
        for (module, name), original in zip(slots, originals, strict=True):
            module._parameters[name] = original
