"""The order of a train node: epochs and minibatches of one train step, an optimizer step for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.base.errors import RunError
from hflow.data.batches.batch import Batch, Column
from hflow.models.expert_balance import ExpertBalance
from hflow.training.interface import (
    BALANCE_LOSS,
    BEHAV_GAP,
    ENGINE_GAP,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS,
    MAX_LOAD,
    NUM_COMPUTED_TOKENS,
    NUM_ENGINE_TOKENS,
    NUM_TRAINED_TOKENS,
    REROUTED,
    SKIPPED_UPDATES,
    NodeCall,
)
from hflow.training.loop.first_pass import FirstPassRunner
from hflow.training.loop.loss import Loss, check_reduction
from hflow.training.loop.metrics import MetricAccumulator
from hflow.training.loop.microbatches import Minibatch
from hflow.training.loop.prox import UpdateProgress
from hflow.types import Unit

_REPLAYED = "replayed"
"""Name of a sum that is no metric by itself: the tokens and layers that `REROUTED` is a share of."""
MAX_NAMED = 16
"""Most samples that an error names."""


class Optimizer(Protocol):
    """The optimizer's methods that a train step uses."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""

    @property
    def skips_nonfinite(self) -> bool:
        """Whether an update whose gradient is not finite is skipped."""

    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient, the same on every rank. May be a collective."""

    def step(self, norm: float) -> None:
        """Clip by the norm that `gradient_norm` returned, update the weights, and drop the gradients."""

    def skip(self) -> None:
        """Drop the gradients without an update."""


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
    num_skipped: int = 0
    """Updates that were skipped. Their losses and metrics are not part of this."""
    replayed: Tensor | float = 0.0
    """This rank's sum of `ReplayedExperts.counts`."""
    routed: Tensor | None = None
    """What `ExpertBalance.total` returned for a minibatch; None: its experts are not balanced."""

    def finish(self, group: ProcessGroup | None) -> dict[str, float]:
        """Return the metrics of the step; a collective over `group`, one rank for each data index.

        A step without an update has no loss, gradient norm or learning rate.
        """
        num_compared = float(self.metrics.num_entries(ENGINE_GAP.suffix))
        rerouted, num_replayed = self.replayed if isinstance(self.replayed, Tensor) else (0.0, 0.0)
        sums = {
            LOSS.suffix: self.loss,
            NUM_COMPUTED_TOKENS.suffix: float(self.metrics.num_computed),
            NUM_ENGINE_TOKENS.suffix: num_compared,
            REROUTED.suffix: rerouted,
            _REPLAYED: num_replayed,
        }
        metrics = self.metrics.finish(group, sums)
        if num_replayed := metrics.pop(_REPLAYED):
            metrics[REROUTED.suffix] /= num_replayed
        else:
            del metrics[REROUTED.suffix]
        if BEHAV_GAP.suffix not in metrics:  # nothing that an engine recorded was read
            del metrics[NUM_ENGINE_TOKENS.suffix]
        loss = metrics.pop(LOSS.suffix)
        if num_updates := len(self.gradient_norms):
            metrics |= {
                LOSS.suffix: loss / num_updates,
                GRAD_NORM.suffix: sum(self.gradient_norms) / num_updates,
                LEARNING_RATE.suffix: self.lr,
            }
        return metrics | {
            NUM_TRAINED_TOKENS.suffix: float(self.num_tokens),
            **({SKIPPED_UPDATES.suffix: float(self.num_skipped)} if self.num_skipped else {}),
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
    first_pass: FirstPassRunner,
    balance: ExpertBalance | None = None,
) -> StepRecord:
    """Run every minibatch of every epoch, with one optimizer step each.

    A minibatch without any learned or observed entry makes no optimizer step. Nor does one whose gradient is
    not finite, if the optimizer skips such steps. All ranks skip the same ones, as they decide by the same
    norm.

    Args:
        minibatches: this rank's part of each minibatch.
        accumulate: runs the forward and backward passes.
        first_pass: runs before the loss of each minibatch, if the node has a first pass.
        balance: the balance of the model's experts; None: they are not balanced.

    Raises:
        RunError: if the loss has a wrong shape, or a gradient is not finite and not skipped.
        RecipeError: if the loss's unit cannot be reduced as the node says.
    """
    ((field_name, unit_name),) = call.returns
    unit = Unit(unit_name)
    reduction = check_reduction(call.node, unit, call.options.get("reduce"))
    num_updates = len(minibatches) * int(call.options.get("epochs", 1))
    record = StepRecord(num_tokens=sum(minibatch.totals[Unit.TOKEN] for minibatch in minibatches))
    for update in range(num_updates):
        minibatch = minibatches[update % len(minibatches)]
        if not minibatch.totals[unit] and not minibatch.num_observed:
            continue
        is_first_epoch, has_changed = update < len(minibatches), len(record.gradient_norms) > 0
        progress = UpdateProgress(step, update, num_updates, is_first_epoch, has_changed)
        loss = Loss(call, field_name, unit, reduction, minibatch.totals, minibatch.num_observed, progress)
        attempt = StepRecord()
        accumulate(loss, first_pass(call, minibatch, progress), attempt)
        norm = optimizer.gradient_norm()
        if not math.isfinite(norm):
            if optimizer.skips_nonfinite:
                optimizer.skip()
                record.num_skipped += 1
                call.on_skipped(_samples(minibatch))
                continue
            where = f"update {update + 1} of step {step + 1}"
            cause = _likely_cause(minibatch, group)
            raise RunError(f"node {call.node!r}: the gradient's norm is {norm} at {where}; {cause}")
        record.metrics.merge(attempt.metrics)
        record.loss += attempt.loss
        record.replayed += attempt.replayed
        record.gradient_norms.append(norm)
        record.lr = optimizer.lr
        optimizer.step(norm)
        if balance is not None:
            assert attempt.routed is not None, "the backend counts the tokens of experts"
            balance.move_biases(attempt.routed)
            loss_of_balance, max_load = balance.figures(attempt.routed)
            record.metrics.add_entries(MAX_LOAD.suffix, max_load)
            if balance.config.coefficient:
                record.metrics.add_entries(BALANCE_LOSS.suffix, loss_of_balance)
    return record


def _likely_cause(minibatch: Minibatch, group: ProcessGroup | None) -> str:
    """Explain a gradient that is not finite: by an input of any rank that is not finite, else by the loss.

    Names samples: those with the input, else those of the minibatch. A collective.
    """
    local = (*_infinite_input(minibatch), _samples(minibatch))
    by_rank: list[Any] = [local]
    if group is not None:
        by_rank = [None] * group.size()
        dist.all_gather_object(by_rank, local, group=group)
    name = next((name for name, _, _ in by_rank if name is not None), None)
    if name is not None:
        bad = [sample for other, infinite, _ in by_rank if other == name for sample in infinite]
        return f"its input {name!r} is not finite{_sample_list(bad)}, so check the node that computes it"
    everything = [sample for _, _, samples in by_rank for sample in samples]
    return (
        f"its inputs are finite{_sample_list(everything)}, so lower the learning rate or check the loss, or "
        "set models.NAME.optim.on_nonfinite=skip"
    )


def _samples(minibatch: Minibatch) -> list[int]:
    """Return this rank's samples of a minibatch. One of several trajectories is there once."""
    return list(dict.fromkeys(int(sample) for batch in minibatch.microbatches for sample in batch.samples))


def _infinite_input(minibatch: Minibatch) -> tuple[str | None, list[int]]:
    """Return an input of this rank that is not finite, and the samples in which it is not."""
    for batch in minibatch.microbatches:
        for name, column in batch.columns.items():
            if isinstance(column.values, np.ndarray) and not np.isfinite(column.values).all():
                return name, _infinite_samples(batch, column)
    return None, []


def _infinite_samples(batch: Batch, column: Column) -> list[int]:
    if column.unit is not Unit.TOKEN:
        return [int(sample) for sample in batch.samples[~np.isfinite(column.values)]]
    spans = zip(batch.samples, batch.offsets, batch.offsets[1:], strict=False)
    return [int(sample) for sample, start, end in spans if not np.isfinite(column.values[start:end]).all()]


def _sample_list(samples: Sequence[int]) -> str:
    """Return ` in samples 3, 5`, with `MAX_NAMED` samples at most."""
    samples = sorted(set(samples))  # ranks of one data index have the same
    named = ", ".join(map(str, samples[:MAX_NAMED]))
    more = f" and {len(samples) - MAX_NAMED} more" if len(samples) > MAX_NAMED else ""
    return f" in {'sample' if len(samples) == 1 else 'samples'} {named}{more}"
