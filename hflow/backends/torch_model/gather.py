"""Gathers sharded weights a bucket at a time: one collective for many tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hflow.types.boxes import Box, numel, whole

BUCKET_BYTES = 64 << 20
"""A bucket is gathered when its whole tensors are at least this large; this bounds the extra memory."""

Named = tuple[str, Tensor]


def whole_tensors(named: Iterable[Named], dtype: torch.dtype) -> Iterator[Named]:
    """Yield every tensor whole, floats in `dtype`; a collective over the ranks that shard them.

    Floats are cast before they travel. Tensors that are not sharded pass through, and may share
    storage with the model.
    """
    bucket: list[tuple[str, DTensor]] = []
    num_bytes = 0
    for name, tensor in named:
        cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if not isinstance(cast, DTensor):
            yield name, cast
            continue
        bucket.append((name, cast))
        num_bytes += cast.numel() * cast.element_size()
        if num_bytes >= BUCKET_BYTES:
            yield from _gather(bucket)
            bucket, num_bytes = [], 0
    if bucket:
        yield from _gather(bucket)


def _gather(bucket: list[tuple[str, DTensor]]) -> Iterator[Named]:
    """One all-gather of what every rank holds of these tensors, and the whole tensors cut out of it."""
    group: ProcessGroup = bucket[0][1].device_mesh.get_group()
    num_ranks = group.size()
    held = [[_num_held(x, rank, num_ranks) for _, x in bucket] for rank in range(num_ranks)]
    width = max(map(sum, held))
    mine = torch.cat([x.to_local().reshape(-1) for _, x in bucket])
    sent = mine.new_zeros(width)
    sent[: len(mine)] = mine
    received = sent.new_empty(num_ranks, width)
    dist.all_gather_into_tensor(received.view(-1), sent, group)
    parts = [row[: sum(sizes)].split(sizes) for row, sizes in zip(received, held, strict=True)]
    for (name, x), pieces in zip(bucket, zip(*parts, strict=True), strict=True):
        yield name, torch.cat(pieces).view(x.shape)


def held_box(tensor: Tensor) -> Box:
    """The part of a tensor that this rank holds: all of one that is not sharded."""
    if not isinstance(tensor, DTensor):
        return whole(tuple(tensor.shape))
    group: ProcessGroup = tensor.device_mesh.get_group()
    return _rows(tensor, group.rank(), group.size())


def _num_held(x: DTensor, rank: int, num_ranks: int) -> int:
    """Entries of a tensor that a rank holds."""
    return numel(_rows(x, rank, num_ranks))


def _rows(x: DTensor, rank: int, num_ranks: int) -> Box:
    """What a rank holds of a tensor: FSDP2 cuts the first axis into equal blocks of rows."""
    num_rows, *others = x.shape
    block = -(-num_rows // num_ranks)
    edges = min(num_rows, rank * block), min(num_rows, (rank + 1) * block)
    return (edges, *whole(tuple(others)))
