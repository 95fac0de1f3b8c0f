"""Sharded checkpoints of an HF model: each rank writes and reads its rows of every weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from hflow.backends.common.sharded_checkpoint import (
    MEAN,
    SQUARE,
    WEIGHT,
    BlockState,
    CheckpointInfo,
    copy_shards,
    open_shards,
)
from hflow.backends.torch_model.optimizer import TorchOptimizer
from hflow.backends.torch_model.packed_model import PackedModel
from hflow.backends.torch_model.weight_export import held_blocks, named_parameters
from hflow.durable_files import WriteFiles


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
        num_steps = 0 if self.optimizer is None else self.optimizer.num_steps
        return CheckpointInfo.of(self.model.config, self.head, num_steps)

    def states(self) -> Iterator[BlockState]:
        """Yield this rank's rows of every weight. No two ranks have the same rows."""
        for weight, block in held_blocks(self.model, self.module, self.module.head, self.head):
            values = {WEIGHT: block.values}
            if self.optimizer is not None:
                values[MEAN], values[SQUARE] = self.optimizer.moments(weight)
            yield BlockState(block.tensor, block.shape, block.box, values)


def copy_model_shards(trained: TrainedModel, directory: Path, group: ProcessGroup | None) -> WriteFiles:
    """Copy this rank's part of a sharded checkpoint, and return the function that writes it; a collective."""
    return copy_shards(directory, trained.states(), trained.info, group)


def load_model_shards(trained: TrainedModel, directory: Path) -> None:
    """Load weights, and of a trainable model the moments, from a sharded checkpoint."""
    named = named_parameters(trained.model, trained.module.head, trained.head)
    shapes = {name: tuple(weight.shape) for name, weight in named}
    with open_shards(directory, trained.info, shapes) as reader:
        for state in trained.states():
            for kind in reader.info.kinds:
                if kind in state.values:
                    reader.fill(state.tensor, state.box, state.values[kind], kind)
        if trained.optimizer is not None:
            trained.optimizer.resume(reader.info.num_steps)
