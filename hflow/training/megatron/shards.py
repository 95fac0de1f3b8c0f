"""Sharded checkpoints of a stage: each data rank writes and reads the ranges that it updates.

The distributed optimizer gives each data rank a range of every flattened parameter. A range of a matrix is
part of a row, whole rows, and part of a row: at most three boxes, which the mapping to HF tensors splits
further. A range of stacked experts is at most five. Every rank therefore reads and writes only its own state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from hflow.base.durable_files import WriteFiles
from hflow.models.host_copy import HostCopies
from hflow.training.megatron.hf_mapping import MappedParameter, ShardPosition, TensorPart
from hflow.training.megatron.model import Stage
from hflow.training.megatron.optimizer import MegatronOptimizer
from hflow.training.megatron.weight_export import held_blocks
from hflow.training.optimizers.interface import saved_kinds
from hflow.training.sharded_checkpoint import (
    WEIGHT,
    BlockState,
    CheckpointInfo,
    copy_shards,
    open_shards,
)
from hflow.types.tensor_slices import Box, box_shape, intersect, numel, slices_within, whole_box


def copy_stage_shards(
    stage: Stage, optimizer: MegatronOptimizer | None, directory: Path, host: HostCopies
) -> WriteFiles:
    """Copy this rank's part of a sharded checkpoint with `copy_shards`; a collective."""
    parameters = _written_parameters(stage)
    states = _frozen_states(stage, parameters) if optimizer is None else _states(parameters, optimizer)
    return copy_shards(directory, states, _info(stage, optimizer), stage.parallel.group, host)


def load_stage_shards(stage: Stage, optimizer: MegatronOptimizer | None, directory: Path) -> None:
    """Load weights, and of a trainable model the optimizer's state, from a sharded checkpoint."""
    whole_model = stage.parameters_at(ShardPosition())
    shapes = {part.tensor: part.shape for parameter in whole_model for part in parameter.parts}
    with open_shards(directory, _info(stage, optimizer), shapes) as reader:
        for block in held_blocks(stage):
            reader.fill(block.tensor, block.box, block.values)
        if optimizer is not None:
            for state in _states(stage.parameters, optimizer):
                for kind in reader.info.kinds:
                    reader.fill(state.tensor, state.box, state.values[kind], kind)
            optimizer.resume(reader.info.num_steps)


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a tensor that a range of its flattened entries consists of, in order."""
    if len(shape) == 1:
        yield ((start, stop),)
        return
    inner = shape[1:]
    width = math.prod(inner)
    while start < stop:
        row, first = divmod(start, width)
        num_rows = 0 if first else (stop - start) // width
        if num_rows:
            yield ((row, row + num_rows), *whole_box(inner))
            start += num_rows * width
            continue
        end = min(stop, (row + 1) * width)
        yield from (((row, row + 1), *box) for box in boxes_of_range(inner, first, first + end - start))
        start = end


def _info(stage: Stage, optimizer: MegatronOptimizer | None) -> CheckpointInfo:
    return CheckpointInfo.of(stage.hf_config, stage.head, optimizer)


def _written_parameters(stage: Stage) -> list[MappedParameter]:
    """Return the parameters that this rank writes. Tensor ranks with the same blocks take turns."""
    parallel = stage.parallel
    by_rank = [
        stage.parameters_at(parallel.shard_position_of(parallel.p, parallel.e, t))
        for t in range(parallel.tensor)
    ]
    written = []
    for index, versions in enumerate(zip(*by_rank, strict=True)):
        local_version = versions[parallel.t]
        holders = [t for t, other in enumerate(versions) if other.parts == local_version.parts]
        is_on_other_stage = all(other.is_copy for other in versions)
        if not is_on_other_stage and holders[index % len(holders)] == parallel.t:
            written.append(local_version)
    return written


def _frozen_states(stage: Stage, parameters: list[MappedParameter]) -> Iterator[BlockState]:
    """Yield the weights of a frozen model on the first of the ranks that have the same."""
    names = {parameter.name for parameter in parameters}
    for parameter in stage.parameters:
        is_first = stage.parallel.is_first_copy(of_experts=parameter.is_expert)
        if is_first and parameter.name in names:
            weight = stage.module.get_parameter(parameter.name).detach().float()
            values = {WEIGHT: weight.view(parameter.shape)}
            yield from _split_box(parameter, whole_box(parameter.shape), values)


def _states(parameters: Iterable[MappedParameter], optimizer: MegatronOptimizer) -> Iterator[BlockState]:
    """Yield the boxes of what this rank updates of some parameters."""
    for parameter in parameters:
        if parameter.name not in optimizer.ranges:
            continue
        master = optimizer.ranges[parameter.name]
        states = zip(saved_kinds(optimizer.name), optimizer.states_of(parameter.name), strict=True)
        flat = {WEIGHT: master.shard.detach(), **dict(states)}
        offset = 0
        for box in boxes_of_range(parameter.shape, master.start, master.stop):
            size = numel(box)
            values = {
                kind: x.view(-1)[offset : offset + size].view(box_shape(box)) for kind, x in flat.items()
            }
            yield from _split_box(parameter, box, values)
            offset += size


def _split_box(parameter: MappedParameter, box: Box, values: Mapping[str, Tensor]) -> Iterator[BlockState]:
    """Split a box of a parameter into boxes of HF tensors, leaving out padding."""
    for part in parameter.parts:
        overlap = intersect(_box_of_part(part, parameter), box) if part.length else None
        if overlap is not None:
            selected = {kind: x[slices_within(overlap, box)] for kind, x in values.items()}
            yield BlockState(part.tensor, part.shape, _shifted(overlap, part.shift), selected)


def _box_of_part(part: TensorPart, parameter: MappedParameter) -> Box:
    """Return the box of a part in its parameter."""
    box = whole_box(parameter.shape)
    return (*box[: part.axis], (part.offset, part.offset + part.length), *box[part.axis + 1 :])


def _shifted(box: Box, by: tuple[int, ...]) -> Box:
    return tuple((start + shift, stop + shift) for (start, stop), shift in zip(box, by, strict=True))
