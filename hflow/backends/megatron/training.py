"""Train nodes on a replica of data, tensor and pipeline ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hflow.backends.base import Call, TrainShard
from hflow.backends.common import training
from hflow.backends.common.cutting import Minibatch
from hflow.backends.common.inputs import Packed, Tokens
from hflow.backends.common.loss import Loss
from hflow.backends.megatron.optim import Optimizer
from hflow.backends.megatron.runner import Runner


def train(
    runner: Runner, optimizer: Optimizer, call: Call, shards: Sequence[TrainShard], step: int
) -> dict[str, float]:
    """Run every minibatch of every epoch; return metrics over the step, on heads.

    Raises:
        RunError, RecipeError: as `common.training.train`.
    """

    def accumulate(loss: Loss, minibatch: Minibatch, record: training.Record) -> None:
        def share(tokens: Tokens, hidden: Tensor) -> Tensor:
            if not isinstance(tokens, Packed):
                return hidden[:0].sum()
            part = loss.share(tokens, runner.output(call, tokens, hidden), record.meter)
            record.loss += part.detach()
            return part

        optimizer.forget()
        runner.schedule.backward(runner.microbatches(minibatch), share)

    grid = runner.stage.grid
    mine = runner.cutting.minibatches(call, shards) if grid.is_head else None
    minibatches = runner.received(mine)
    runner.stage.module.train()
    record = training.train(call, step, minibatches, accumulate, optimizer, grid.group)
    return record.finish(runner.cutting.group) if grid.is_head else {}
