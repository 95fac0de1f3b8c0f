"""What is trained of a stage, as sharded checkpoints hold it.

The distributed optimizer keeps a range of each flattened parameter on a data rank. A range of a matrix is
part of a row, whole rows, part of a row: at most three boxes, which the parameter's parts cut into boxes of
checkpoint tensors. So every rank reads and writes its own state, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from hflow.backends.common.sharded_checkpoint import (
    MEAN,
    SQUARE,
    WEIGHT,
    BlockState,
    CheckpointInfo,
    open_shards,
    write_shards,
)
from hflow.backends.megatron.hf_mapping import MappedParameter, ShardPosition, TensorPart, parameters
from hflow.backends.megatron.model import Stage
from hflow.backends.megatron.optimizer import MegatronOptimizer
from hflow.backends.megatron.weight_export import held_blocks
from hflow.types.tensor_slices import Box, meet, numel, sizes, whole, within


def save(stage: Stage, optimizer: MegatronOptimizer | None, directory: Path) -> None:
    """Write a sharded checkpoint; a collective over the replica."""
    rows = _written(stage)
    states = _frozen(stage, rows) if optimizer is None else _states(rows, optimizer)
    write_shards(directory, states, _about(stage, optimizer), stage.parallel.group)


def load(stage: Stage, optimizer: MegatronOptimizer | None, directory: Path) -> None:
    """Take a sharded checkpoint; the model in half precision is its rounding."""
    whole_model = parameters(stage.dims, ShardPosition())
    shapes = {part.tensor: part.shape for row in whole_model for part in row.parts}
    with open_shards(directory, _about(stage, optimizer), shapes) as source:
        for block in held_blocks(stage):
            source.fill(block.tensor, block.box, block.values)
        if optimizer is not None:
            for state in _states(stage.parameters, optimizer):
                for kind in source.about.kinds:
                    source.fill(state.tensor, state.box, state.values[kind], kind)
            optimizer.resume(source.about.num_steps)


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """A range of a flattened vector or matrix as boxes of it, one after the other."""
    if len(shape) == 1:
        yield ((start, stop),)
        return
    _, width = shape
    while start < stop:
        row, column = divmod(start, width)
        num_rows = 1 if column else max(1, (stop - start) // width)
        end = min(stop, (row + num_rows) * width)
        last = width if num_rows > 1 else column + end - start
        yield ((row, row + num_rows), (column, last))
        start = end


def _about(stage: Stage, optimizer: MegatronOptimizer | None) -> CheckpointInfo:
    return CheckpointInfo.of(stage.hf_config, stage.head, 0 if optimizer is None else optimizer.num_steps)


def _written(stage: Stage) -> list[MappedParameter]:
    """The parameters that this rank writes: those with the same blocks are shared out to their holders."""
    parallel = stage.parallel
    held = [
        parameters(stage.dims, ShardPosition(t, parallel.tensor, parallel.p, parallel.pipe))
        for t in range(parallel.tensor)
    ]
    mine = []
    for index, rows in enumerate(zip(*held, strict=True)):
        row = rows[parallel.t]
        holders = [t for t, other in enumerate(rows) if other.parts == row.parts]
        is_elsewhere = all(other.is_copy for other in rows)  # on another stage
        if not is_elsewhere and holders[index % len(holders)] == parallel.t:
            mine.append(row)
    return mine


def _frozen(stage: Stage, rows: list[MappedParameter]) -> Iterator[BlockState]:
    """Of a model that nothing steps data ranks hold the same: the first one writes."""
    names = {row.name for row in rows} if stage.parallel.d == 0 else set()
    for row in stage.parameters:
        if row.name in names:
            weight = stage.module.get_parameter(row.name).detach().float()
            yield from _cut(row, whole(row.shape), {WEIGHT: weight.view(row.shape)})


def _states(
    rows: tuple[MappedParameter, ...] | list[MappedParameter], optimizer: MegatronOptimizer
) -> Iterator[BlockState]:
    """The boxes of all that this rank steps of some parameters."""
    for row in rows:
        if row.name not in optimizer.ranges:
            continue
        master = optimizer.ranges[row.name]
        mean, square = optimizer.moments(row.name)
        flat = {WEIGHT: master.shard.detach(), MEAN: mean, SQUARE: square}
        at = 0
        for box in boxes_of_range(row.shape, master.start, master.stop):
            size = numel(box)
            values = {kind: x.view(-1)[at : at + size].view(sizes(box)) for kind, x in flat.items()}
            yield from _cut(row, box, values)
            at += size


def _cut(row: MappedParameter, box: Box, values: Mapping[str, Tensor]) -> Iterator[BlockState]:
    """A box of a parameter as boxes of checkpoint tensors; padding is in none."""
    for part in row.parts:
        met = meet(_place(part, row), box) if part.length else None
        if met is not None:
            cut = {kind: x[within(met, box)] for kind, x in values.items()}
            yield BlockState(part.tensor, part.shape, _moved(met, part.axis, part.span[0] - part.at), cut)


def _place(part: TensorPart, row: MappedParameter) -> Box:
    """Where a part lies in its parameter."""
    box = whole(row.shape)
    return (*box[: part.axis], (part.at, part.at + part.length), *box[part.axis + 1 :])


def _moved(box: Box, axis: int, by: int) -> Box:
    start, stop = box[axis]
    return (*box[:axis], (start + by, stop + by), *box[axis + 1 :])
