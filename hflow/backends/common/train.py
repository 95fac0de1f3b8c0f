"""The order of a train node: epochs and minibatches of one train step, an optimizer step for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.backends.common.loss import Loss, check_reduction
from hflow.backends.common.metrics import MetricAccumulator
from hflow.backends.common.microbatches import Minibatch
from hflow.backends.common.prox import UpdateProgress
from hflow.backends.interface import (
    BEHAV_GAP,
    ENGINE_GAP,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS,
    NUM_ENGINE_TOKENS,
    NUM_TRAINED_TOKENS,
    NodeCall,
)
from hflow.errors import RunError
from hflow.types import Unit


class Optimizer(Protocol):
    """The optimizer's methods that a train step uses."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""

    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient, the same on every rank. May be a collective."""

    def step(self, norm: float) -> None:
        """Clip by the norm that `gradient_norm` returned, update the weights, and drop the gradients."""


@dataclass
class StepRecord:
    """Losses and metrics of a train step on one rank."""

    metrics: MetricAccumulator = field(default_factory=MetricAccumulator)
    gradient_norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    loss: Tensor | float = 0.0
    """This rank's part, summed over the optimizer steps."""
    num_tokens: int = 0
    """Learned tokens of the batch, over all ranks."""

    def finish(self, group: ProcessGroup | None) -> dict[str, float]:
        """Return the metrics of the step; a collective over `group`, one rank for each data index."""
        num_updates = max(len(self.gradient_norms), 1)
        num_compared = float(self.metrics.num_entries(ENGINE_GAP.suffix))
        sums = {LOSS.suffix: float(self.loss), NUM_ENGINE_TOKENS.suffix: num_compared}
        metrics = self.metrics.finish(group, sums)
        if BEHAV_GAP.suffix not in metrics:  # nothing that an engine recorded was read
            del metrics[NUM_ENGINE_TOKENS.suffix]
        return metrics | {
            LOSS.suffix: metrics[LOSS.suffix] / num_updates,
            GRAD_NORM.suffix: sum(self.gradient_norms) / num_updates,
            LEARNING_RATE.suffix: self.lr,
            NUM_TRAINED_TOKENS.suffix: float(self.num_tokens),
        }


Accumulate = Callable[[Loss, Minibatch, StepRecord], None]
"""Sums the gradients of a minibatch over its micro-batches and all ranks; records losses and metrics."""


def run_train(
    call: NodeCall,
    step: int,
    minibatches: Sequence[Minibatch],
    accumulate: Accumulate,
    optimizer: Optimizer,
    group: ProcessGroup | None,
) -> StepRecord:
    """Run every minibatch of every epoch, with one optimizer step each.

    A minibatch without any learned entry makes no optimizer step.

    Args:
        call: the node's body and its options.
        step: the number of the train step.
        minibatches: this rank's part of each minibatch.
        accumulate: runs the forward and backward passes.
        optimizer: steps once for each minibatch.
        group: all ranks of the replica; None for one.

    Raises:
        RunError: if the loss has a wrong shape, or a gradient is not finite.
        RecipeError: if the loss's unit cannot be reduced as the node says.
    """
    ((field_name, unit_name),) = call.returns
    unit = Unit(unit_name)
    reduction = check_reduction(call.node, unit, call.options.get("reduce"))
    num_updates = len(minibatches) * int(call.options.get("epochs", 1))
    record = StepRecord(num_tokens=sum(minibatch.totals[Unit.TOKEN] for minibatch in minibatches))
    for update in range(num_updates):
        minibatch = minibatches[update % len(minibatches)]
        if not minibatch.totals[unit]:
            continue
        is_first_epoch, has_changed = update < len(minibatches), bool(record.gradient_norms)
        progress = UpdateProgress(step, update, num_updates, is_first_epoch, has_changed)
        loss = Loss(call, field_name, unit, reduction, minibatch.totals, progress)
        accumulate(loss, minibatch, record)
        norm = optimizer.gradient_norm()
        record.gradient_norms.append(norm)
        if not math.isfinite(norm):
            where = f"update {update} of step {step}"
            cause = _likely_cause(minibatch, group)
            raise RunError(f"node {call.node!r}: the gradient's norm is {norm} at {where}; {cause}")
        record.lr = optimizer.lr
        optimizer.step(norm)
    return record


def _likely_cause(minibatch: Minibatch, group: ProcessGroup | None) -> str:
    """Explain a gradient that is not finite: by an input of any rank that is not finite, else by the loss."""
    names: list[str | None] = [_infinite_input(minibatch)]
    if group is not None:
        local_name, names = names[0], [None] * group.size()
        dist.all_gather_object(names, local_name, group=group)
    name = next((name for name in names if name is not None), None)
    if name is not None:
        return f"its input {name!r} is not finite, so check the node that computes it"
    return "its inputs are finite, so lower the learning rate or check the loss"


def _infinite_input(minibatch: Minibatch) -> str | None:
    for batch in minibatch.microbatches:
        for name, column in batch.columns.items():
            if isinstance(column.values, np.ndarray) and not np.isfinite(column.values).all():
                return name
    return None
