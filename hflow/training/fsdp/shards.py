"""Sharded checkpoints of an HF model: each rank writes and reads its rows of every weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from hflow.base.durable_files import WriteFiles
from hflow.models.expert_tensors import stacked_views
from hflow.models.host_copy import HostCopies
from hflow.training.fsdp.optimizer import TorchOptimizer
from hflow.training.fsdp.packed_model import PackedModel
from hflow.training.fsdp.shard_collectives import replicate_index
from hflow.training.fsdp.weight_export import blocks_of, held_blocks, named_parameters, reshard
from hflow.training.optimizers.interface import states_at
from hflow.training.sharded_checkpoint import (
    WEIGHT,
    BlockState,
    CheckpointInfo,
    copy_shards,
    open_shards,
)
from hflow.types.tensor_slices import Block


@dataclass(frozen=True)
class TrainedModel:
    """A model with its head and its optimizer."""

    model: PreTrainedModel
    module: PackedModel
    head: str
    optimizer: TorchOptimizer | None
    """None for a frozen model."""

    @property
    def info(self) -> CheckpointInfo:
        """Description of the model for its checkpoint."""
        return CheckpointInfo.of(self.model.config, self.head, self.optimizer)

    def states(self, *, are_read: bool = False) -> Iterator[BlockState]:
        """Yield this rank's rows of every weight. Only ranks along a replicate axis have the same rows.

        `are_read` says that their values are overwritten by those of a checkpoint.
        """
        names = {weight: name for name, weight in self.named_parameters()}
        for weight, blocks in held_blocks(self.model, self.module, self.module.head, self.head):
            kinds = {WEIGHT: blocks}
            held: tuple[Tensor, ...] = ()
            if self.optimizer is not None:
                states = states_at(self.optimizer.optim, blocks[0].tensor, weight.dim())
                held = self.optimizer.states_of(weight, len(states))
                for state, values in zip(states, held, strict=True):
                    kinds[state.name] = blocks_of(self.model, names[weight], weight, values)
            for index, block in enumerate(blocks):
                of_block = {kind: parts[index].values for kind, parts in kinds.items()}
                yield BlockState(block.tensor, block.shape, block.box, of_block)
            if self.optimizer is not None and are_read:
                self.optimizer.load_states(weight, held)

    def saved_states(self) -> Iterator[BlockState]:
        """Yield the states that this rank writes. Ranks along a replicate axis take turns."""
        reshard(self.module)  # a weight that is whole has no mesh
        index, num = replicate_index(next(self.module.parameters()))
        return islice(self.states(), index, None, num)

    def saved_sizes(self) -> list[int]:
        """Return the bytes of each value of `saved_states` after the first step; allocates no state."""
        index, num = replicate_index(next(self.module.parameters()))
        pairs = held_blocks(self.model, self.module, self.module.head, self.head)
        blocks = (block for _, blocks in pairs for block in blocks)
        return [
            int(block.values.numel() * entry_bytes)
            for block in islice(blocks, index, None, num)
            for entry_bytes in self._saved_bytes(block)
        ]

    def _saved_bytes(self, block: Block) -> list[int]:
        """Return the bytes of an entry of each value of a block."""
        optimizer, num_axes = self.optimizer, len(block.shape)
        states = () if optimizer is None else states_at(optimizer.optim, block.tensor, num_axes)
        return [block.values.itemsize, *(state.saved_bytes for state in states)]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return every weight that training changes, with its name in the module."""
        return named_parameters(self.model, self.module.head, self.head)


def copy_model_shards(
    trained: TrainedModel, directory: Path, group: ProcessGroup | None, host: HostCopies
) -> WriteFiles:
    """Copy this rank's part of a sharded checkpoint with `copy_shards`; a collective."""
    return copy_shards(directory, trained.saved_states(), trained.info, group, host)


def load_model_shards(trained: TrainedModel, directory: Path) -> None:
    """Load weights, and of a trainable model the optimizer's state, from a sharded checkpoint."""
    named = ((name, torch.empty(weight.shape, device="meta")) for name, weight in trained.named_parameters())
    whole = stacked_views(trained.model.config.model_type, named)
    shapes = {name: tuple(tensor.shape) for name, tensor in whole}
    with open_shards(directory, trained.info, shapes) as reader:
        for state in trained.states(are_read=True):
            for kind in reader.info.kinds_of(state.tensor, len(state.shape)):
                if kind in state.values:
                    reader.fill(state.tensor, state.box, state.values[kind], kind)
        if trained.optimizer is not None:
            trained.optimizer.resume(reader.info.num_steps)
