"""Train nodes on a whole or an FSDP-sharded model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hflow.backends.base import Call, TrainShard
from hflow.backends.common import training
from hflow.backends.common.cutting import Minibatch
from hflow.backends.common.loss import Loss
from hflow.backends.torch_model.optim import Optimizer
from hflow.backends.torch_model.runner import Runner


def train(
    runner: Runner, optimizer: Optimizer, call: Call, shards: Sequence[TrainShard], step: int
) -> dict[str, float]:
    """Run every minibatch of every epoch; return metrics over the step, the same on all ranks.

    Raises:
        RunError, RecipeError: as `common.training.train`.
    """

    def accumulate(loss: Loss, minibatch: Minibatch, record: training.Record) -> None:
        for batch in minibatch.microbatches:
            share = runner.forward(
                batch, loss.call, lambda packed, output: loss.share(packed, output, record.meter)
            )
            torch.autograd.backward(share)
            record.loss += share.detach()
        for _ in range(minibatch.num_microbatches - len(minibatch.microbatches)):
            torch.autograd.backward(runner.idle())

    minibatches = runner.cutting.minibatches(call, shards)
    runner.module.train()
    return training.train(call, step, minibatches, accumulate, optimizer, runner.group).finish(runner.group)
