"""A stage's weights as whole tensors under their HF names, a bucket at a time.

A bucket of parameters goes from its stage to all stages, and is then gathered over the tensor ranks; every
rank puts the same tensors together. The whole model is in no rank's memory at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hflow.backends.megatron.mapping import Parameter, Place, parameters
from hflow.backends.megatron.model import Stage
from hflow.types.boxes import Block

BUCKET_BYTES = 64 << 20
"""A bucket is closed when a rank's part of it is at least this large."""

Named = tuple[str, Tensor]
Rows = tuple[Parameter, ...]
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
    for p in range(stage.grid.pipe):
        for bucket in _buckets(stage, p, dtype):
            parts = _everywhere(stage, p, bucket, values, dtype)
            for rows, tensors in zip(bucket, parts, strict=True):
                if is_taker:
                    yield from _put_together(rows, tensors)


def _buckets(stage: Stage, p: int, dtype: torch.dtype) -> Iterator[list[Rows]]:
    """The parameters of a pipeline stage that are not copies of another stage's."""
    grid = stage.grid
    held = [parameters(stage.sizes, Place(t, grid.tensor, p, grid.pipe)) for t in range(grid.tensor)]
    bucket: list[Rows] = []
    num_bytes = 0
    for rows in zip(*held, strict=True):
        if all(row.is_copy for row in rows):
            continue
        bucket.append(rows)
        num_bytes += math.prod(rows[0].shape) * dtype.itemsize
        if num_bytes >= BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
    if bucket:
        yield bucket


def _everywhere(
    stage: Stage, p: int, bucket: Sequence[Rows], values: Mapping[str, Tensor], dtype: torch.dtype
) -> list[list[Tensor]]:
    """For each parameter of the bucket, what every tensor rank of stage `p` holds of it."""
    grid, shapes = stage.grid, [rows[0].shape for rows in bucket]
    mine = [values[rows[0].name].detach().to(dtype) for rows in bucket] if grid.p == p else []
    if grid.tensor * grid.pipe == 1:
        return [[x] for x in mine]
    lengths = [math.prod(shape) for shape in shapes]
    if mine:
        flat = torch.cat([x.reshape(-1) for x in mine])
    else:
        flat = torch.empty(sum(lengths), dtype=dtype, device=stage.device)
    if grid.pipe > 1:
        dist.broadcast(flat, group=grid.groups.pp, group_src=p)
    received = flat[None]
    if grid.tensor > 1:
        received = flat.new_empty(grid.tensor, len(flat))
        dist.all_gather(list(received), flat, group=grid.groups.tp)
    columns = received.split(lengths, dim=1)
    return [[x.view(shape) for x in column] for column, shape in zip(columns, shapes, strict=True)]


def _put_together(rows: Rows, tensors: Sequence[Tensor]) -> Iterator[Named]:
    """The checkpoint tensors that one parameter consists of on all tensor ranks together."""
    (first, *others) = rows[0].parts
    if not others and first.shape == rows[0].shape:
        yield first.tensor, tensors[0]
        return
    whole: dict[str, Tensor] = {}
    for row, tensor in zip(rows, tensors, strict=True):
        for part in row.parts:
            if part.tensor not in whole:
                whole[part.tensor] = tensor.new_empty(part.shape)
            block = tensor.narrow(part.axis, part.at, part.length)
            whole[part.tensor].narrow(part.axis, part.span[0], part.length).copy_(block)
    yield from whole.items()
