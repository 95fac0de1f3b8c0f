"""A data index's minibatches on their way from its head to its tensor and pipeline ranks, once a step.

Every stage computes from token ids and lengths; what else a body reads goes to the tensor ranks of the
last stage only. Columns keep their types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hflow.backends.common.cutting import Minibatch
from hflow.backends.megatron.grid import Grid
from hflow.data.batch import Column

_OF_LAYERS = "input_ids"
"""The column that layers read. Ids of samples and groups and lengths are no columns."""

Columns = dict[str, Column]
Value = TypeVar("Value")


def share_out(grid: Grid, mine: Sequence[Minibatch] | None, device: torch.device) -> list[Minibatch]:
    """The minibatches of this rank's data index; a collective over its tensor and pipeline ranks.

    Args:
        grid: this rank's place.
        mine: the head's, prepared and cut; None on other ranks.
        device: where collectives of the grid's groups find their tensors.

    Returns:
        On the last stage, what the head has; on the others, without the columns that only bodies read.
    """
    whole = None if mine is None else list(mine)
    tensor_ranks = grid.groups.tp
    if grid.pipe == 1:
        return _sent(whole, tensor_ranks, 0, device)
    stages = None if whole is None else [_for_layers(minibatch) for minibatch in whole]
    received = _sent(stages, grid.groups.mp, (grid.pipe - 1) * grid.tensor, device)
    if not grid.is_last_stage:
        return received
    rest = None if whole is None else [_for_bodies(minibatch) for minibatch in whole]
    return [_joined(*parts) for parts in zip(received, _sent(rest, tensor_ranks, 0, device), strict=True)]


def _for_layers(minibatch: Minibatch) -> Minibatch:
    batches = tuple(batch.select([_OF_LAYERS]) for batch in minibatch.microbatches)
    return replace(minibatch, microbatches=batches)


def _for_bodies(minibatch: Minibatch) -> list[Columns]:
    """Columns of each micro-batch that bodies read and layers do not."""
    return [
        {name: column for name, column in batch.columns.items() if name != _OF_LAYERS}
        for batch in minibatch.microbatches
    ]


def _joined(minibatch: Minibatch, rest: Sequence[Columns]) -> Minibatch:
    batches = zip(minibatch.microbatches, rest, strict=True)
    return replace(minibatch, microbatches=tuple(batch.with_columns(columns) for batch, columns in batches))


def _sent(value: Value | None, group: ProcessGroup, source: int, device: torch.device) -> Value:
    """What the rank `source` of a group has; None stands for it on the others. A collective."""
    boxed = [value]
    if group.size() > 1:
        dist.broadcast_object_list(boxed, group=group, group_src=source, device=device)
    (sent,) = boxed
    assert sent is not None
    return sent
