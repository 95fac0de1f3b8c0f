"""A rank's stage with what surrounds its forward: its schedule, its inputs and its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.backends.common.inputs import PackedBatch, PackedTokens, empty_shard, to_device, tokens_of
from hflow.backends.common.microbatches import MicrobatchSplitter, Minibatch
from hflow.backends.interface import NodeCall
from hflow.backends.megatron.model import Stage
from hflow.backends.megatron.parallel_state import ParallelState
from hflow.backends.megatron.schedule import PipelineSchedule
from hflow.backends.megatron.vocab_parallel import output_of
from hflow.data.batch import Column
from hflow.types import Output

# -------------------- A data index's minibatches on their way from its head to its tensor and pipeline
# ranks, once a step.
# Every stage computes from token ids and lengths; what else a body reads goes to the tensor ranks of the
# last stage only. Columns keep their types.


_OF_LAYERS = "input_ids"
"""The column that layers read. Ids of samples and groups and lengths are no columns."""

Columns = dict[str, Column]
Value = TypeVar("Value")


def share_out(
    parallel: ParallelState, mine: Sequence[Minibatch] | None, device: torch.device
) -> list[Minibatch]:
    """The minibatches of this rank's data index; a collective over its tensor and pipeline ranks.

    Args:
        parallel: this rank's place.
        mine: the head's, prepared and cut; None on other ranks.
        device: where collectives of the parallel's groups find their tensors.

    Returns:
        On the last stage, what the head has; on the others, without the columns that only bodies read.
    """
    whole = None if mine is None else list(mine)
    tensor_ranks = parallel.groups.tp
    if parallel.pipe == 1:
        return _sent(whole, tensor_ranks, 0, device)
    stages = None if whole is None else [_for_layers(minibatch) for minibatch in whole]
    received = _sent(stages, parallel.groups.mp, (parallel.pipe - 1) * parallel.tensor, device)
    if not parallel.is_last_stage:
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


@dataclass(frozen=True)
class MegatronRunner:
    """Everything here but `output` is called by all ranks of a replica together."""

    stage: Stage
    schedule: PipelineSchedule
    cutting: MicrobatchSplitter
    """The head's: agrees with the other data indices' heads."""
    touched: dict[str, set[str]] = field(default_factory=dict)
    """node -> parts of the output that its body touched so far."""

    def received(self, mine: Sequence[Minibatch] | None) -> list[Minibatch]:
        """The minibatches that this data index's head has; other ranks have None."""
        return share_out(self.stage.parallel, mine, self.stage.device)

    def microbatches(self, minibatch: Minibatch) -> list[PackedTokens]:
        """Micro-batches on the device, as many on every rank.

        The last stage, which runs the body, gets `PackedBatch`. A rank with fewer micro-batches than others
        is filled up with micro-batches of one unlearned token.
        """
        device, dtype = self.stage.device, self.stage.dtype
        is_last = self.stage.parallel.is_last_stage
        filled = [(to_device if is_last else tokens_of)(b, device, dtype) for b in minibatch.microbatches]
        num_idle = minibatch.num_microbatches - len(filled)
        return [*filled, *[tokens_of(empty_shard(), device, dtype)] * num_idle]

    def output(self, call: NodeCall, packed: PackedBatch, hidden: Tensor) -> Output:
        """What the body gets, on the last stage; a collective over its tensor ranks when it is touched."""
        touched = self.touched.setdefault(call.node, set())
        return output_of(self.stage, packed, hidden, call.temperature, touched)
