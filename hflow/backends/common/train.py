"""Train nodes: the minibatches and epochs of one step, an optimizer step for each."""

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
from hflow.backends.interface import GRAD_NORM, LEARNING_RATE, LOSS, NUM_TRAINED_TOKENS, NodeCall
from hflow.errors import RunError
from hflow.types import Unit


class Optimizer(Protocol):
    """What a step asks of an optimizer; `gradient_norm` may be a collective over the replica."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""

    def gradient_norm(self) -> float:
        """Norm of the whole gradient, the same on every rank."""

    def step(self, norm: float) -> None:
        """Clip by the norm that `gradient_norm` returned, step, and forget the gradients."""


@dataclass
class StepRecord:
    """What the updates of a step leave behind on a rank."""

    meter: MetricAccumulator = field(default_factory=MetricAccumulator)
    norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    loss: Tensor | float = 0.0
    """Sum over the updates, of this rank's shares."""
    num_tokens: int = 0
    """Learned tokens of the batch, over all ranks."""

    def finish(self, group: ProcessGroup | None) -> dict[str, float]:
        """Metrics of the step; a collective over `group`, one rank for each dp index."""
        updates = max(len(self.norms), 1)
        metrics = self.meter.finish(group, {LOSS.suffix: float(self.loss)})
        return metrics | {
            LOSS.suffix: metrics[LOSS.suffix] / updates,
            GRAD_NORM.suffix: sum(self.norms) / updates,
            LEARNING_RATE.suffix: self.lr,
            NUM_TRAINED_TOKENS.suffix: float(self.num_tokens),
        }


Accumulate = Callable[[Loss, Minibatch, StepRecord], None]
"""Sums the gradients of a minibatch over all its micro-batches and ranks; notes losses and metrics."""


def train(
    call: NodeCall,
    step: int,
    minibatches: Sequence[Minibatch],
    accumulate: Accumulate,
    optimizer: Optimizer,
    group: ProcessGroup | None,
) -> StepRecord:
    """Run every minibatch of every epoch.

    A minibatch of which nothing is learned anywhere is skipped: no optimizer step is made.

    Args:
        call: the body and its options.
        step: the step that is trained.
        minibatches: this rank's part of each.
        accumulate: the forward and backward passes.
        optimizer: steps once for each minibatch.
        group: all ranks of the replica; None for one.

    Raises:
        RunError: when the body's loss is not one or the gradient is not finite.
        RecipeError: when the node's reduction is not one of its loss's unit.
    """
    ((name, unit_name),) = call.returns
    unit = Unit(unit_name)
    reduce = check_reduction(call.node, unit, call.options.get("reduce"))
    num_updates = len(minibatches) * int(call.options.get("epochs", 1))
    record = StepRecord(num_tokens=sum(minibatch.totals[Unit.TOKEN] for minibatch in minibatches))
    for update in range(num_updates):
        minibatch = minibatches[update % len(minibatches)]
        if not minibatch.totals[unit]:
            continue
        loss = Loss(call, name, unit, reduce, minibatch.totals, UpdateProgress(step, update, num_updates))
        accumulate(loss, minibatch, record)
        norm = optimizer.gradient_norm()
        record.norms.append(norm)
        if not math.isfinite(norm):
            where = f"update {update} of step {step}"
            suspect = _first_suspect(minibatch, group)
            raise RunError(f"node {call.node!r}: the gradient's norm is {norm} at {where}; {suspect}")
        record.lr = optimizer.lr
        optimizer.step(norm)
    return record


def _first_suspect(minibatch: Minibatch, group: ProcessGroup | None) -> str:
    """What to look at when a gradient is not finite: an input that is not on any rank, else the loss."""
    suspects: list[str | None] = [_infinite_input(minibatch)]
    if group is not None:
        mine, suspects = suspects[0], [None] * group.size()
        dist.all_gather_object(suspects, mine, group=group)
    name = next((name for name in suspects if name is not None), None)
    if name is not None:
        return f"its input {name!r} is not finite"
    return "its inputs are finite, so lower the learning rate or mend the loss"


def _infinite_input(minibatch: Minibatch) -> str | None:
    for batch in minibatch.microbatches:
        for name, column in batch.columns.items():
            if isinstance(column.values, np.ndarray) and not np.isfinite(column.values).all():
                return name
    return None
