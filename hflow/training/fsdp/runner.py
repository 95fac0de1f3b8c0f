"""Runs infer and train nodes on a whole or an FSDP-sharded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.data.batches.batch import Batch
from hflow.models.expert_balance import BalancedTokens, ExpertBalance
from hflow.training.fsdp.optimizer import TorchOptimizer
from hflow.training.fsdp.packed_model import PackedModel
from hflow.training.fsdp.sharding import kept_after_forward, set_collectives
from hflow.training.interface import NodeCall, TrainShard
from hflow.training.loop.first_pass import FirstPassRunner
from hflow.training.loop.infer import returned_fields, run_infer
from hflow.training.loop.inputs import (
    PackedBatch,
    check_temperature,
    pack_batch,
    placeholder_batch,
    replays_experts,
    sequence_shares,
)
from hflow.training.loop.loss import Loss
from hflow.training.loop.microbatches import MicrobatchSplitter, Minibatch
from hflow.training.loop.train import StepRecord, run_train
from hflow.types import Output

Result = TypeVar("Result")


@dataclass(frozen=True)
class TorchRunner:
    """Runs micro-batches through the model, the same number on every rank, as FSDP requires."""

    module: PackedModel
    device: torch.device
    dtype: torch.dtype
    group: ProcessGroup | None
    """The ranks that the weights are sharded over; None for one."""
    splitter: MicrobatchSplitter
    zero_stage: int = 3
    """What these ranks share (`models.NAME.zero_stage`)."""
    balance: ExpertBalance | None = None
    requested: dict[str, set[str]] = field(default_factory=dict)
    """Node -> output fields that its body has used so far."""

    def infer(self, call: NodeCall, shards: Sequence[Batch]) -> list[Batch]:
        """Run an infer node; see `ModelBackend.infer`."""
        return run_infer(call, shards, self.splitter, self._run_forwards)

    def train(
        self, optimizer: TorchOptimizer, call: NodeCall, shards: Sequence[TrainShard], step: int
    ) -> dict[str, float]:
        """Run a train node; see `ModelBackend.train`."""

        def accumulate(loss: Loss, minibatch: Minibatch, record: StepRecord) -> None:
            balanced: list[BalancedTokens] = []
            counted = self._counted(call, minibatch)
            self.module.train()

            def microbatch_loss(packed: PackedBatch, output: Output) -> Tensor:
                if packed.replayed is not None:
                    record.replayed += packed.replayed.counts()
                return loss.microbatch_loss(packed, output, record.metrics)

            with kept_after_forward(self.module, self.zero_stage):
                for index in range(minibatch.num_microbatches):
                    if self.group is not None:
                        is_last = index == minibatch.num_microbatches - 1
                        set_collectives(self.module, self.zero_stage, is_last=is_last)
                    if index < len(minibatch.microbatches):
                        tokens = self._balanced(minibatch, counted, balanced)
                        part = self._forward(minibatch.microbatches[index], call, microbatch_loss, tokens)
                        torch.autograd.backward(part)
                        record.loss += part.detach()
                    else:
                        torch.autograd.backward(self._forward_placeholder())
            if self.balance is not None:
                record.routed = self.balance.total(balanced)

        minibatches = self.splitter.minibatches(call, shards)
        first_pass = FirstPassRunner(self._run_forwards, self.group, self.device)
        record = run_train(
            *(call, step, minibatches, accumulate, optimizer, self.group, first_pass, self.balance)
        )
        return record.finish(self.group)

    def _balanced(
        self, minibatch: Minibatch, counted: Tensor | None, balanced: list[BalancedTokens]
    ) -> Callable[[PackedBatch], PackedBatch] | None:
        """Return a function that adds what routers balance to a micro-batch, and to a list."""
        balance = self.balance
        if balance is None:
            return None

        def add(packed: PackedBatch) -> PackedBatch:
            shares = sequence_shares(packed.batch, minibatch.totals)
            balanced.append(balance.tokens(packed.batch, packed.sharing, shares, counted))
            return replace(packed, balanced=balanced[-1])

        return add

    @torch.no_grad()
    def _counted(self, call: NodeCall, minibatch: Minibatch) -> Tensor | None:
        """Count the tokens of each expert in a minibatch, if they must be known before its loss."""
        if self.balance is None or not self.balance.counts_first:
            return None
        self.module.eval()
        balanced: list[BalancedTokens] = []
        tokens = self._balanced(minibatch, None, balanced)
        self._run_all(minibatch, lambda batch: self._forward(batch, call, lambda *_: None, tokens))
        return self.balance.total(balanced)

    @torch.no_grad()
    def _run_forwards(self, call: NodeCall, minibatch: Minibatch) -> list[Batch]:
        """Run forward passes and an infer body; return its fields for each micro-batch of this rank."""
        self.module.eval()

        def fields(packed: PackedBatch, output: Output) -> Batch:
            return returned_fields(call, packed, output)

        return self._run_all(minibatch, lambda batch: self._forward(batch, call, fields))

    def _run_all(self, minibatch: Minibatch, forward: Callable[[Batch], Result]) -> list[Result]:
        """Run forward passes of this rank's micro-batches, and join those of the other ranks."""
        results = [forward(batch) for batch in minibatch.microbatches]
        for _ in range(minibatch.num_microbatches - len(minibatch.microbatches)):
            self._forward_placeholder()
        return results

    def _forward(
        self,
        batch: Batch,
        call: NodeCall,
        consume: Callable[[PackedBatch, Output], Result],
        balanced: Callable[[PackedBatch], PackedBatch] | None = None,
    ) -> Result:
        """Run a prepared micro-batch and `consume`, which runs within the forward pass, on whole weights."""
        check_temperature(call)
        packed = pack_batch(batch, self.device, self.dtype, replays_experts(call), self.module.vision)
        if balanced is not None:
            packed = balanced(packed)
        requested = self.requested.setdefault(call.node, set())
        result: Result = self.module(
            packed, lambda output: consume(packed, output), call.temperature, lambda: requested
        )
        return result

    def _forward_placeholder(self) -> Tensor:
        """Join a forward pass of the other ranks; return a zero whose backward pass joins theirs."""
        zero: Tensor = self.module(
            pack_batch(placeholder_batch(), self.device, self.dtype, vision=self.module.vision), None
        )
        return zero
