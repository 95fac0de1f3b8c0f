"""Runs infer and train nodes on a rank's stage: distributes the head's samples, then runs the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.data.batches.batch import Batch, Column
from hflow.models.expert_balance import ExpertBalance
from hflow.training.interface import NodeCall, TrainShard
from hflow.training.loop.first_pass import FirstPassRunner
from hflow.training.loop.infer import returned_fields, run_infer
from hflow.training.loop.inputs import (
    LEARNED,
    NUM_SEQUENCES,
    PackedBatch,
    PackedTokens,
    pack_batch,
    pack_tokens,
    placeholder_batch,
    replays_experts,
    sequence_shares,
)
from hflow.training.loop.loss import Loss
from hflow.training.loop.microbatches import MicrobatchSplitter, Minibatch
from hflow.training.loop.train import StepRecord, run_train
from hflow.training.megatron.context_parallel import RowDivision, divide_rows
from hflow.training.megatron.model import Stage
from hflow.training.megatron.optimizer import MegatronOptimizer
from hflow.training.megatron.parallel_state import ParallelState
from hflow.training.megatron.schedule import PipelineSchedule, StageTokens
from hflow.training.megatron.stage_output import stage_output
from hflow.types import Output
from hflow.types.recorded import requestable_kinds


@dataclass(frozen=True)
class MegatronRunner:
    """Runs nodes on a stage. All ranks of a replica call it together."""

    stage: Stage
    schedule: PipelineSchedule
    splitter: MicrobatchSplitter
    """Used on heads; agrees with the heads of other data indices."""
    balance: ExpertBalance | None = None
    requested: dict[str, set[str]] = field(default_factory=dict)
    """Node -> output fields that its body has used so far."""

    def infer(self, call: NodeCall, shards: Sequence[Batch]) -> list[Batch]:
        """Run an infer node; see `ModelBackend.infer`."""

        def run_head(call: NodeCall, minibatch: Minibatch) -> list[Batch]:
            return self._run_forwards(call, self._receive([minibatch])[0])

        if self.stage.parallel.is_head:
            return run_infer(call, shards, self.splitter, run_head)
        self._run_forwards(call, self._receive(None)[0])
        return []

    def train(
        self, optimizer: MegatronOptimizer, call: NodeCall, shards: Sequence[TrainShard], step: int
    ) -> dict[str, float]:
        """Run a train node; see `ModelBackend.train`."""

        def accumulate(loss: Loss, minibatch: Minibatch, record: StepRecord) -> None:
            def microbatch_loss(of: StageTokens, hidden: Tensor) -> Tensor:
                if not isinstance(of.tokens, PackedBatch):
                    return self.stage.zero_loss(hidden)
                output = self._output(call, of.tokens, of.division, hidden)
                part = loss.microbatch_loss(of.tokens, output, record.metrics)
                record.loss += part.detach()
                return part

            microbatches = self._microbatches(call, minibatch)
            if self.balance is not None:
                microbatches = self._balanced(self.balance, minibatch, microbatches)
            self.stage.module.train()
            optimizer.zero_grad()
            self.schedule.backward(microbatches, microbatch_loss)
            for of in microbatches:
                if of.replayed is not None:
                    record.replayed += of.replayed.counts()
            if self.balance is not None:
                record.routed = _total(self.balance, microbatches)

        parallel = self.stage.parallel
        head_minibatches = self.splitter.minibatches(call, shards) if parallel.is_head else None
        minibatches = self._receive(head_minibatches)
        first_pass = FirstPassRunner(
            self._run_forwards, parallel.groups.dp, self.stage.device, parallel.is_last_stage
        )
        record = run_train(
            *(call, step, minibatches, accumulate, optimizer, parallel.group, first_pass, self.balance)
        )
        if replays_experts(call):  # each rank has seen some layers and some tokens
            record.replayed += torch.zeros(2, device=self.stage.device)
            dist.all_reduce(record.replayed, group=parallel.same_data)
        return record.finish(self.splitter.group) if parallel.is_head else {}

    def _balanced(
        self, balance: ExpertBalance, minibatch: Minibatch, microbatches: list[StageTokens]
    ) -> list[StageTokens]:
        """Return the micro-batches with what routers balance. A collective, if tokens are counted first."""

        def laid_out(counted: Tensor | None) -> list[StageTokens]:
            placeholders = [placeholder_batch()] * (minibatch.num_microbatches - len(minibatch.microbatches))
            pairs = zip(microbatches, (*minibatch.microbatches, *placeholders), strict=True)
            return [self._with_balance(balance, minibatch, batch, of, counted) for of, batch in pairs]

        if not balance.counts_first:
            return laid_out(None)
        counting = laid_out(None)
        self.stage.module.eval()
        self.schedule.forward(counting, lambda of, hidden: None)
        return laid_out(_total(balance, counting))

    def _with_balance(
        self,
        balance: ExpertBalance,
        minibatch: Minibatch,
        batch: Batch,
        of: StageTokens,
        counted: Tensor | None,
    ) -> StageTokens:
        here = self.stage.rows_here(len(of.tokens.computed_ids), of.division)
        shares = sequence_shares(batch, minibatch.totals)
        return replace(of, balanced=balance.tokens(batch, of.tokens.sharing, shares, counted, here))

    def _run_forwards(self, call: NodeCall, minibatch: Minibatch) -> list[Batch]:
        """Run forward passes and, on the last stage, an infer body; return its fields by micro-batch."""

        def finish(of: StageTokens, hidden: Tensor) -> Batch | None:
            if not isinstance(of.tokens, PackedBatch):
                return None
            return returned_fields(call, of.tokens, self._output(call, of.tokens, of.division, hidden))

        self.stage.module.eval()
        results = self.schedule.forward(self._microbatches(call, minibatch), finish)
        return [result for result in results if result is not None]

    def _receive(self, head_minibatches: Sequence[Minibatch] | None) -> list[Minibatch]:
        """Return the minibatches of this data index's head; `head_minibatches` is None on other ranks."""
        return broadcast_minibatches(self.stage.parallel, head_minibatches, self.stage.device)

    def _microbatches(self, call: NodeCall, minibatch: Minibatch) -> list[StageTokens]:
        """Return the micro-batches on the device, the same number on every rank.

        The last stage, which runs the body, gets `PackedBatch`. A rank with fewer micro-batches than others
        also gets placeholders.
        """
        device, dtype, replays = self.stage.device, self.stage.dtype, replays_experts(call)
        pack = pack_batch if self.stage.parallel.is_last_stage else pack_tokens
        packed = [
            self._divided(batch, pack(batch, device, dtype, replays)) for batch in minibatch.microbatches
        ]
        if num_placeholders := minibatch.num_microbatches - len(packed):
            placeholder = placeholder_batch()
            packed += [self._divided(placeholder, pack_tokens(placeholder, device, dtype))] * num_placeholders
        return packed

    def _divided(self, batch: Batch, tokens: PackedTokens) -> StageTokens:
        """Return a micro-batch with the division of its rows over context ranks, if there are any."""
        stage, division = self.stage, None
        if stage.parallel.context > 1:
            with_outputs = isinstance(tokens, PackedBatch)
            group, multiple = stage.parallel.groups.cp, stage.row_multiple
            division = divide_rows(batch, tokens.sharing, group, multiple, stage.device, with_outputs)
        replayed = None if tokens.replayed is None else stage.replayed_here(tokens.replayed, division)
        return StageTokens(tokens, division, replayed)

    def _output(
        self, call: NodeCall, packed: PackedBatch, division: RowDivision | None, hidden: Tensor
    ) -> Output:
        """Return the body's output, on the last stage. Using its fields is a collective over its ranks."""
        requested = self.requested.setdefault(call.node, set())
        return stage_output(self.stage, packed, division, hidden, call.temperature, requested)


_REPLAYED = (kind.name for kind in requestable_kinds() if kind.replayed_in == "layers")
LAYER_COLUMNS = ("input_ids", LEARNED, NUM_SEQUENCES, *_REPLAYED)
"""The columns that layers need, if there are any. Sample ids, group ids and lengths are not columns."""


def _total(balance: ExpertBalance, microbatches: Sequence[StageTokens]) -> Tensor:
    """Return the sums of what the routers of all ranks found in a minibatch; a collective."""
    return balance.total(of.balanced for of in microbatches if of.balanced is not None)


Columns = dict[str, Column]
Value = TypeVar("Value")


def broadcast_minibatches(
    parallel: ParallelState, head_minibatches: Sequence[Minibatch] | None, device: torch.device
) -> list[Minibatch]:
    """Send a head's minibatches to the other ranks of its data index; a collective over them.

    Every stage computes from token ids and lengths. Columns that only the body reads are sent to the ranks of
    the last stage only. Columns keep their dtypes.

    Args:
        head_minibatches: the head's minibatches, prepared and split; None on other ranks.

    Returns:
        The head's minibatches; on stages before the last one, without the columns that only the body reads.
    """
    whole = None if head_minibatches is None else list(head_minibatches)
    stage_ranks = parallel.groups.tp_cp
    if parallel.pipe == 1:
        return _broadcast(whole, stage_ranks, 0, device)
    for_layers = None if whole is None else [_for_layers(minibatch) for minibatch in whole]
    head_rank = (parallel.pipe - 1) * stage_ranks.size()
    received = _broadcast(for_layers, parallel.same_data, head_rank, device)
    if not parallel.is_last_stage:
        return received
    for_bodies = None if whole is None else [_for_bodies(minibatch) for minibatch in whole]
    others = _broadcast(for_bodies, stage_ranks, 0, device)
    return [_join(minibatch, columns) for minibatch, columns in zip(received, others, strict=True)]


def _for_layers(minibatch: Minibatch) -> Minibatch:
    batches = tuple(
        batch.select([name for name in LAYER_COLUMNS if name in batch.columns])
        for batch in minibatch.microbatches
    )
    return replace(minibatch, microbatches=batches)


def _for_bodies(minibatch: Minibatch) -> list[Columns]:
    """Return the columns of each micro-batch that only bodies read."""
    return [
        {name: column for name, column in batch.columns.items() if name not in LAYER_COLUMNS}
        for batch in minibatch.microbatches
    ]


def _join(minibatch: Minibatch, others: Sequence[Columns]) -> Minibatch:
    pairs = zip(minibatch.microbatches, others, strict=True)
    return replace(minibatch, microbatches=tuple(batch.with_columns(columns) for batch, columns in pairs))


def _broadcast(value: Value | None, group: ProcessGroup, source: int, device: torch.device) -> Value:
    """Return the value of a group's rank `source`; other ranks pass None. A collective."""
    values = [value]
    if group.size() > 1:
        dist.broadcast_object_list(values, group=group, group_src=source, device=device)
    (received,) = values
    assert received is not None
    return received
