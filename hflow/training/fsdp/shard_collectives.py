"""Gathering weights from shards, and summing gradients into them.

Over gloo these are messages between the ranks. Its own all-gather and reduce-scatter copy the whole tensor
once more, into memory whose pages the system clears each time. Messages are read and written in place: with
76 MB on two ranks, an all-gather takes a third of the time, and a reduce-scatter less than half.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def shard_group(tensor: DTensor) -> ProcessGroup:
    """Return the ranks that a tensor is sharded over; with a replicate axis, this rank's set of them."""
    mesh = tensor.device_mesh
    group: ProcessGroup = mesh.get_group(mesh.ndim - 1)
    return group


def replicate_index(tensor: Tensor) -> tuple[int, int]:
    """Return this rank's index on the replicate axis of a tensor, and the size of the axis."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim == 1:
        return 0, 1
    mesh = tensor.device_mesh
    return mesh.get_local_rank(0), mesh.size(0)


def gather_in_place(whole: Tensor, group: ProcessGroup | None = None) -> None:
    """Fill a tensor `[ranks * n]` of which each rank has its part, `[rank * n : (rank + 1) * n]`."""
    num, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = whole.chunk(num)
    if not _sends_messages(group):
        dist.all_gather_into_tensor(whole, parts[rank], group)
        return
    works = []
    for step in range(1, num):
        to, source = (rank + step) % num, (rank - step) % num
        works.append(dist.isend(parts[rank], group=group, group_dst=to))
        works.append(dist.irecv(parts[source], group=group, group_src=source))
    _wait(works)


def sum_parts(part: Tensor, whole: Tensor, group: ProcessGroup | None = None) -> None:
    """Sum the parts of `whole`, `[ranks * n]`, over all ranks, and put this rank's sum into `part`, `[n]`.

    There is more than one rank.
    """
    if not _sends_messages(group):
        dist.reduce_scatter_tensor(part, whole, group=group)
        return
    num, rank = dist.get_world_size(group), dist.get_rank(group)
    parts, other = whole.chunk(num), torch.empty_like(part if num > 2 else part[:0])
    total = parts[rank]
    for step in range(1, num):
        to, source = (rank + step) % num, (rank - step) % num
        received = part if step == 1 else other
        work = dist.isend(parts[to], group=group, group_dst=to)
        _wait([work, dist.irecv(received, group=group, group_src=source)])
        total = torch.add(total, received, out=part)


def use_messages(unit: FSDPModule, group: ProcessGroup) -> None:
    """Let a sharded module use these functions where they send messages."""
    if _sends_messages(group):
        unit.set_custom_all_gather(_AllGather())  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]


def _sends_messages(group: ProcessGroup | None) -> bool:
    return dist.get_backend(group) == "gloo"


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "only members of a group take part"
        work.wait()


class _Buffers:
    """Allocates for FSDP, whose own base class is not part of torch's public interface."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for the input or output."""
        return torch.empty(size, dtype=dtype, device=device)


class _AllGather(_Buffers):
    """`gather_in_place`, as FSDP calls it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill the output, of which the input is this rank's part; returns when all parts are there."""
        assert input_tensor.data_ptr() == output_tensor.chunk(group.size())[group.rank()].data_ptr()
        gather_in_place(output_tensor, group)


class _ReduceScatter(_Buffers):
    """`sum_parts`, as FSDP calls it."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Sum this rank's part of the input; returns when the sum is there."""
        assert op == dist.ReduceOp.SUM, "a model's gradients are summed"
        sum_parts(output_tensor, input_tensor, group)
