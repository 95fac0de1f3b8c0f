"""Train nodes: the minibatches and epochs of one step, an optimizer step for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hflow.backends.base import Call, TrainShard
from hflow.backends.torch_model.inputs import Packed
from hflow.backends.torch_model.meter import Meter
from hflow.backends.torch_model.optim import Optimizer
from hflow.backends.torch_model.prox import Progress, approximation_errors, made_fields
from hflow.backends.torch_model.reduce import check_reduction, entry_weights
from hflow.backends.torch_model.runner import Runner
from hflow.backends.torch_model.schedule import Minibatch
from hflow.data.binding import bind
from hflow.data.returned import check_shape, split_result
from hflow.errors import RunError
from hflow.types import Output, Unit


def train(
    runner: Runner, optimizer: Optimizer, call: Call, shards: Sequence[TrainShard], step: int
) -> dict[str, float]:
    """Run every minibatch of every epoch; return metrics over the step, the same on all ranks.

    A minibatch of which nothing is learned anywhere is skipped: no optimizer step is made.

    Raises:
        RunError: when the body's loss is not one or the gradient is not finite.
        RecipeError: when the node's reduction is not one of its loss's unit.
    """
    ((name, unit_name),) = call.returns
    unit = Unit(unit_name)
    reduce = check_reduction(call.node, unit, call.options.get("reduce"))
    minibatches = runner.cutting.minibatches(call, shards)
    num_updates = len(minibatches) * int(call.options.get("epochs", 1))
    runner.module.train()
    record = _Record()
    for update in range(num_updates):
        minibatch = minibatches[update % len(minibatches)]
        if minibatch.totals[unit]:
            loss = Loss(call, name, unit, reduce, minibatch.totals, Progress(step, update, num_updates))
            _update(runner, optimizer, loss, minibatch, record)
    num_tokens = sum(minibatch.totals[Unit.TOKEN] for minibatch in minibatches)
    return record.finish(runner, num_tokens)


@dataclass
class _Record:
    """What the updates of a step leave behind."""

    meter: Meter = field(default_factory=Meter)
    norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    loss: Tensor | float = 0.0
    """Sum over the updates, of this rank's shares."""

    def finish(self, runner: Runner, num_tokens: int) -> dict[str, float]:
        """Metrics of the step (a collective)."""
        updates = max(len(self.norms), 1)
        metrics = self.meter.finish(runner.group, {"loss": float(self.loss)})
        return metrics | {
            "loss": metrics["loss"] / updates,
            "grad_norm": sum(self.norms) / updates,
            "lr": self.lr,
            "num_tokens": float(num_tokens),
        }


@dataclass(frozen=True)
class Loss:
    """From a forward's output to this micro-batch's share of the minibatch's loss."""

    call: Call
    name: str
    unit: Unit
    reduce: str
    totals: dict[Unit, int]
    progress: Progress

    def share(self, packed: Packed, output: Output, meter: Meter) -> Tensor:
        """Run the body, note its metrics, and weigh its entries.

        Raises:
            RunError: when the loss has another shape than its unit, or does not depend on the model.
        """
        call = self.call
        made = made_fields(call, output, packed, self.progress)
        result = call.body(**bind(call, packed.batch, packed.seqs, output, made))
        (entries,), metrics = split_result(call.node, call.returns, call.metrics, result)
        entries = check_shape(call.node, self.name, self.unit, entries, packed.seqs)
        if entries.dim() != 1:
            raise RunError(f"node {call.node!r}: a loss has one number an entry, not {list(entries.shape)}")
        if not entries.requires_grad:
            raise RunError(f"node {call.node!r}: its loss does not depend on the model's output")
        metrics = metrics | approximation_errors(call, output, packed, self.progress)
        meter.add(call.node, metrics, packed, self.unit)
        valid = packed.valid[self.unit]
        return (entries.masked_fill(~valid, 0) * entry_weights(self.reduce, packed, self.totals)).sum()


def _update(runner: Runner, optimizer: Optimizer, loss: Loss, minibatch: Minibatch, record: _Record) -> None:
    """Sum the gradients of all micro-batches of all ranks, and make one optimizer step."""
    for batch in minibatch.microbatches:
        share = runner.forward(
            batch, loss.call, lambda packed, output: loss.share(packed, output, record.meter)
        )
        torch.autograd.backward(share)
        record.loss += share.detach()
    for _ in range(minibatch.num_microbatches - len(minibatch.microbatches)):
        torch.autograd.backward(runner.idle())
    norm = optimizer.gradient_norm()
    record.norms.append(norm.item())
    if not math.isfinite(record.norms[-1]):
        where = f"update {loss.progress.update} of step {loss.progress.step}"
        raise RunError(
            f"node {loss.call.node!r}: the gradient's norm is {record.norms[-1]} at {where}; "
            f"{_suspect(minibatch)}"
        )
    record.lr = optimizer.lr
    optimizer.step(norm)


def _suspect(minibatch: Minibatch) -> str:
    """What to look at when a gradient is not finite: an input that is not, else the loss itself."""
    for batch in minibatch.microbatches:
        for name, column in batch.columns.items():
            if isinstance(column.values, np.ndarray) and not np.isfinite(column.values).all():
                return f"its input {name!r} is not finite"
    return "its inputs are finite, so lower the learning rate or mend the loss"
