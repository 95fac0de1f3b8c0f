"""Sharded checkpoints of a stage: each data rank writes and reads the ranges that it updates.

The distributed optimizer gives each data rank a range of every flattened parameter (`hf_ranges.py`). Every
rank reads and writes only its own state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from hflow.base.durable_files import WriteFiles
from hflow.models.host_copy import HostCopies
from hflow.training.megatron.hf_mapping import MappedParameter
from hflow.training.megatron.hf_ranges import range_blocks
from hflow.training.megatron.model import Stage
from hflow.training.megatron.optimizer import MegatronOptimizer
from hflow.training.megatron.weight_export import held_blocks
from hflow.training.optimizers.interface import states_at
from hflow.training.sharded_checkpoint import (
    WEIGHT,
    BlockState,
    CheckpointInfo,
    copy_shards,
    open_shards,
)


def copy_stage_shards(
    stage: Stage, optimizer: MegatronOptimizer | None, directory: Path, host: HostCopies
) -> WriteFiles:
    """Copy this rank's part of a sharded checkpoint with `copy_shards`; a collective."""
    parameters = _written_parameters(stage)
    states = _frozen_states(stage, parameters) if optimizer is None else _states(parameters, optimizer)
    return copy_shards(directory, states, _info(stage, optimizer), stage.parallel.group, host)


def load_stage_shards(stage: Stage, optimizer: MegatronOptimizer | None, directory: Path) -> None:
    """Load weights, and of a trainable model the optimizer's state, from a sharded checkpoint."""
    shapes = stage.optimized_shapes
    with open_shards(directory, _info(stage, optimizer), shapes) as reader:
        for block in held_blocks(stage):
            if block.tensor in shapes:
                reader.fill(block.tensor, block.box, block.values)
        if optimizer is not None:
            for state in _states(stage.parameters, optimizer, are_read=True):
                for kind in reader.info.kinds_of(state.tensor, len(state.shape)):
                    reader.fill(state.tensor, state.box, state.values[kind], kind)
            optimizer.resume(reader.info.num_steps)


def _info(stage: Stage, optimizer: MegatronOptimizer | None) -> CheckpointInfo:
    return CheckpointInfo.of(stage.hf_config, stage.head, optimizer)


def _written_parameters(stage: Stage) -> list[MappedParameter]:
    """Return the parameters that this rank writes. Tensor ranks with the same blocks take turns.

    Biases of routers, which have no optimizer, are in the model's Hugging Face files alone.
    """
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
        if local_version.is_score_bias:
            continue
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
            for block in range_blocks(parameter, 0, weight):
                yield BlockState(block.tensor, block.shape, block.box, {WEIGHT: block.values})


def _states(
    parameters: Iterable[MappedParameter], optimizer: MegatronOptimizer, *, are_read: bool = False
) -> Iterator[BlockState]:
    """Yield the boxes of what this rank updates of some parameters, whose values may be read into them."""
    for parameter in parameters:
        if parameter.name not in optimizer.ranges:
            continue
        master, part = optimizer.ranges[parameter.name], parameter.parts[0]
        kinds = (state.name for state in states_at(optimizer.optim, part.tensor, len(part.shape)))
        held = optimizer.states_of(parameter.name)
        states = dict(zip(kinds, held, strict=True))
        blocks = {
            kind: list(range_blocks(parameter, master.start, values))
            for kind, values in {WEIGHT: master.shard.detach(), **states}.items()
        }
        for index, block in enumerate(blocks[WEIGHT]):
            values = {kind: parts[index].values for kind, parts in blocks.items()}
            yield BlockState(block.tensor, block.shape, block.box, values)
        if are_read:
            optimizer.load_states(parameter.name, held)
