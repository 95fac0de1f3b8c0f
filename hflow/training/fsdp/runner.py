"""Runs infer and train nodes on a whole or an FSDP-sharded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.data.batches.batch import Batch
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
                        part = self._forward(minibatch.microbatches[index], call, microbatch_loss)
                        torch.autograd.backward(part)
                        record.loss += part.detach()
                    else:
                        torch.autograd.backward(self._forward_placeholder())

        minibatches = self.splitter.minibatches(call, shards)
        first_pass = FirstPassRunner(self._run_forwards, self.group, self.device)
        record = run_train(call, step, minibatches, accumulate, optimizer, self.group, first_pass)
        return record.finish(self.group)

    @torch.no_grad()
    def _run_forwards(self, call: NodeCall, minibatch: Minibatch) -> list[Batch]:
        """Run forward passes and an infer body; return its fields for each micro-batch of this rank."""
        self.module.eval()
        results = [
            self._forward(batch, call, lambda packed, output: returned_fields(call, packed, output))
            for batch in minibatch.microbatches
        ]
        for _ in range(minibatch.num_microbatches - len(minibatch.microbatches)):
            self._forward_placeholder()
        return results

    def _forward(
        self, batch: Batch, call: NodeCall, consume: Callable[[PackedBatch, Output], Result]
    ) -> Result:
        """Run a prepared micro-batch and `consume`, which runs within the forward pass, on whole weights."""
        check_temperature(call)
        packed = pack_batch(batch, self.device, self.dtype, replays_experts(call), self.module.vision)
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
