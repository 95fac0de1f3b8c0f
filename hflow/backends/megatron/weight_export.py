"""A stage's weights as whole tensors under their HF names, a bucket at a time.

A bucket of parameters goes from its stage to all stages, and is then gathered over the tensor ranks; every
taker puts the same tensors together. The whole model is in no rank's memory at once: what a taker has beside
its shard is a bucket, or one tensor where that is larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hflow.backends.megatron.hf_mapping import MappedParameter, ShardPosition, parameters
from hflow.backends.megatron.model import Stage
from hflow.types.tensor_slices import Block

BUCKET_BYTES = 64 << 20
"""The most that a rank's part of a bucket has, unless a single parameter has more; that goes in pieces."""

Named = tuple[str, Tensor]
Rows = tuple[MappedParameter, ...]
"""One parameter as each tensor rank holds it."""


def held_blocks(stage: Stage, values: Mapping[str, Tensor] | None = None) -> Iterator[Block]:
    """Yield the parts of checkpoint tensors that this rank's parameters consist of, as views of them.

    Args:
        stage: this rank's.
        values: other tensors in place of the parameters, by parameter name and in their shapes.
    """
    values = dict(stage.module.named_parameters()) if values is None else values
    for row in stage.parameters:
        tensor = values[row.name].detach()
        for part in row.parts:
            if part.length:
                yield Block(part.tensor, part.shape, part.box, tensor.narrow(part.axis, part.at, part.length))


def named_weights(
    stage: Stage,
    dtype: torch.dtype | None = None,
    values: Mapping[str, Tensor] | None = None,
    is_taker: bool = True,
) -> Iterator[Named]:
    """Yield every tensor of the model whole, on every taker; a collective over the ranks of a data index.

    Tied weights come under their first name, a scalar head's as `value_head.*` or `score_head.*`. What is
    yielded may share storage with the model: copy what is to be kept.

    Args:
        stage: this rank's.
        dtype: of what is yielded; the stage's by default. Weights are cast before they travel.
        values: other tensors in place of the parameters, by parameter name and in their shapes.
        is_taker: whether this rank wants them; if not, it gives what it has, and nothing is yielded.
    """
    dtype = stage.dtype if dtype is None else dtype
    values = dict(stage.module.named_parameters()) if values is None else values
    for p in range(stage.parallel.pipe):
        for bucket in _buckets(stage, p, dtype):
            columns = _everywhere(stage, p, bucket, values, dtype, is_taker)
            if is_taker:
                for rows, column in zip(bucket, columns, strict=True):
                    yield from _put_together(rows, column)


def _buckets(stage: Stage, p: int, dtype: torch.dtype) -> Iterator[list[Rows]]:
    """The parameters of a pipeline stage that are not copies of another stage's; a large one is alone."""
    parallel = stage.parallel
    held = [
        parameters(stage.dims, ShardPosition(t, parallel.tensor, p, parallel.pipe))
        for t in range(parallel.tensor)
    ]
    bucket: list[Rows] = []
    num_bytes = 0
    for rows in zip(*held, strict=True):
        if all(row.is_copy for row in rows):
            continue
        size = math.prod(rows[0].shape) * dtype.itemsize
        if bucket and num_bytes + size > BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(rows)
        num_bytes += size
    if bucket:
        yield bucket


def _everywhere(
    stage: Stage,
    p: int,
    bucket: Sequence[Rows],
    values: Mapping[str, Tensor],
    dtype: torch.dtype,
    is_taker: bool,
) -> list[Tensor]:
    """For each parameter of the bucket, what the tensor ranks of stage `p` hold of it: `[tensor, *shape]`.

    Piece by piece, so that only takers ever have more than a bucket. Nothing for the others.
    """
    parallel, shapes = stage.parallel, [rows[0].shape for rows in bucket]
    lengths = [math.prod(shape) for shape in shapes]
    total, size = sum(lengths), BUCKET_BYTES // dtype.itemsize
    mine = [values[rows[0].name].detach().reshape(-1) for rows in bucket] if parallel.p == p else []
    if parallel.tensor * parallel.pipe == 1:
        return [flat.to(dtype).view(1, *shape) for flat, shape in zip(mine, shapes, strict=True)]
    flat = mine[0] if len(mine) == 1 else torch.cat(mine) if mine else None
    received = torch.empty(parallel.tensor, total if is_taker else 0, dtype=dtype, device=stage.device)
    for start in range(0, total, size):
        stop = min(start + size, total)
        slots = received[:, start:stop] if is_taker else received.new_empty(parallel.tensor, stop - start)
        own = slots[parallel.t]
        if flat is not None:
            own.copy_(flat[start:stop])
        if parallel.pipe > 1:
            dist.broadcast(own, group=parallel.groups.pp, group_src=p)
        if parallel.tensor > 1:
            dist.all_gather(list(slots), own, group=parallel.groups.tp)
    if not is_taker:
        return []
    columns = received.split(lengths, dim=1)
    return [x.unflatten(1, shape) for x, shape in zip(columns, shapes, strict=True)]


def _put_together(rows: Rows, column: Tensor) -> Iterator[Named]:
    """The checkpoint tensors that one parameter `[tensor, *shape]` consists of on all tensor ranks."""
    (first, *others) = rows[0].parts
    if not others and first.shape == rows[0].shape:
        yield first.tensor, column[0]
        return
    if _follow_each_other(rows):
        yield first.tensor, column.flatten(0, 1)[: first.shape[0]]
        return
    whole: dict[str, Tensor] = {}
    for row, tensor in zip(rows, column, strict=True):
        for part in row.parts:
            if part.tensor not in whole:
                whole[part.tensor] = tensor.new_empty(part.shape)
            block = tensor.narrow(part.axis, part.at, part.length)
            whole[part.tensor].narrow(part.axis, part.span[0], part.length).copy_(block)
    yield from whole.items()


def _follow_each_other(rows: Rows) -> bool:
    """Whether one rank's rows come after another's, as they are; padding is then at the end."""
    size = rows[0].shape[0]
    return all(
        len(row.parts) == 1
        and (part := row.parts[0]).axis == 0
        and part.span[0] == min(t * size, part.shape[0])
        for t, row in enumerate(rows)
    )
