"""How far the engine's log-probs are from the trainer's for the same tokens.

An engine draws a token from its own distribution and records its log-prob, `behav`. The trainer computes
another number, `theta`, for two reasons: its weights may be newer than those that drew the token, and its
kernels and dtype differ. Each train step measures both together (`behav_gap`), and the second alone
(`engine_gap`), on the tokens that were drawn with the version that the weights of the trainer's forward pass
have. This is the pass before the step's first update; with `prox="recompute"` or `"metrics"`, the one that
computed the proximal log-probs.

A micro-batch's loss: the body's entries, weighted so that the sum over all ranks is the minibatch's loss.

Denominators are global: the weights of all entries of a minibatch sum to 1 over all micro-batches and ranks
(except for `token-sum/N`). So do those of observed tokens, whatever the reduction of learned ones. A
micro-batch's part of the loss is `sum(weight * entry)`, and these parts add up.

Axes: S sequences, T packed tokens, P groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hflow.algo import kl_k3
from hflow.base.errors import RecipeError, RunError
from hflow.data.batches.batch_arguments import bind_batch, get_column, to_tensor
from hflow.data.batches.returned_values import split_result
from hflow.data.batches.unpack_returns import check_shape
from hflow.metrics import Metric
from hflow.training.interface import (
    BEHAV_GAP,
    BEHAV_GAP_MAX,
    BEHAV_KL,
    ENGINE_GAP,
    ENGINE_GAP_MAX,
    ENGINE_KL,
    OBSERVED_NLL,
    NodeCall,
)
from hflow.training.loop.inputs import (
    COUNT,
    NUM_LEARNED,
    NUM_SEQUENCES,
    PackedBatch,
    body_sequences,
    count_observed,
)
from hflow.training.loop.metrics import MetricAccumulator
from hflow.training.loop.output import LmOutput
from hflow.training.loop.prox import PROX, UpdateProgress, computed_fields, prox_errors
from hflow.types import Output, Unit

BEHAV, VERSIONS = "behav_logprobs", "versions"


def add_engine_gap(
    call: NodeCall, output: Output, packed: PackedBatch, progress: UpdateProgress, metrics: MetricAccumulator
) -> None:
    """Compare the learned tokens of a micro-batch and add the differences to the metrics.

    Nothing is added for nodes that do not read what the engine recorded, nor in passes with other weights
    than those of the step's start.
    """
    if not {BEHAV, VERSIONS} <= {read.field for read in call.reads}:
        return
    columns = packed.batch.columns
    positions = np.flatnonzero(np.asarray(columns["loss_mask"].values))
    trainer = _trainer_logprobs(call, output, packed, progress) if len(positions) else None
    if trainer is None:
        return
    chosen = to_tensor(positions, trainer.device)
    theta = trainer[chosen].float()
    behav = to_tensor(get_column(packed.batch, BEHAV).values, trainer.device)[chosen].float()
    gap, kl = (theta - behav).abs(), kl_k3(behav, theta, cap=None)
    _add(metrics, (BEHAV_GAP, BEHAV_GAP_MAX, BEHAV_KL), gap, kl)
    same_weights = np.flatnonzero(np.asarray(columns[VERSIONS].values)[positions] == progress.step)
    if len(same_weights):
        compared = to_tensor(same_weights, trainer.device)
        _add(metrics, (ENGINE_GAP, ENGINE_GAP_MAX, ENGINE_KL), gap[compared], kl[compared])


def _add(metrics: MetricAccumulator, names: tuple[Metric, Metric, Metric], gap: Tensor, kl: Tensor) -> None:
    for metric, entries in zip(names, (gap, gap, kl), strict=True):
        metrics.add_entries(metric.suffix, entries)


def _trainer_logprobs(
    call: NodeCall, output: Output, packed: PackedBatch, progress: UpdateProgress
) -> Tensor | None:
    """Return log-probs `[T]` under the weights of the step's start; None if this pass has others."""
    if call.options.get("prox") in ("recompute", "metrics") and PROX in packed.batch.columns:
        if not progress.is_first_epoch:
            return None
        return to_tensor(get_column(packed.batch, PROX).values, packed.input_ids.device)
    if progress.has_changed or not call.is_first_writer:
        return None
    return output.logprobs.detach()


REDUCTIONS: Mapping[Unit, str] = {
    Unit.TOKEN: r"token-mean|seq-mean-token-sum|seq-mean-token-mean|token-sum/[1-9]\d*",
    Unit.SEQUENCE: "seq-mean",
    Unit.GROUP: "group-mean",
}
"""Loss unit -> pattern of its reductions."""


@dataclass(frozen=True)
class Loss:
    """The loss of a train node in one optimizer step."""

    call: NodeCall
    field: str
    """Name of the returned loss."""
    unit: Unit
    reduction: str
    totals: dict[Unit, int]
    """Tokens, samples and groups that count in the whole minibatch, over all ranks."""
    num_observed: int
    """Observed tokens of the whole minibatch, over all ranks."""
    progress: UpdateProgress

    def microbatch_loss(self, packed: PackedBatch, output: Output, metrics: MetricAccumulator) -> Tensor:
        """Run the body on a micro-batch, record its metrics, and return its part of the minibatch's loss.

        Raises:
            RunError: if the loss has a wrong shape, does not depend on the model, or does not read the
                observed tokens that the node asks for.
        """
        call = self.call
        computed = computed_fields(call, output, packed, self.progress)
        result = call.body(**bind_batch(call, packed.batch, body_sequences(call, packed), output, computed))
        (entries,), values = split_result(call.node, call.returns, call.metrics, result)
        entries = check_shape(call.node, self.field, self.unit, entries, packed.seqs)
        if entries.dim() != 1:
            raise RunError(
                f"node {call.node!r}: its loss has shape {list(entries.shape)}, but must have one number per "
                f"{self.unit}; reduce the other axes"
            )
        if not entries.requires_grad:
            raise RunError(
                f"node {call.node!r}: its loss does not depend on the model's output; compute it from the "
                "Output parameter, without detach() or no_grad()"
            )
        values = values | prox_errors(call, output, packed, self.progress)
        metrics.add(call.node, values, packed, self.unit)
        add_engine_gap(call, output, packed, self.progress, metrics)
        valid, weights = packed.valid[self.unit], entry_weights(self.reduction, packed, self.totals)
        if packed.observed is not None:
            self._add_observed(packed, output, metrics)
            valid = valid | packed.observed
            weights = weights + packed.observed / max(self.num_observed, 1)
        return (entries.masked_fill(~valid, 0) * weights).sum()

    def _add_observed(self, packed: PackedBatch, output: Output, metrics: MetricAccumulator) -> None:
        """Add the mean of -log p of the observed tokens to the metrics."""
        if not isinstance(output, LmOutput) or not output.reads_observed:
            raise RunError(
                f"node {self.call.node!r}: observed={self.call.options['observed']!r} has no effect, as its "
                "loss does not read out.observed_logprobs. Remove observed="
            )
        if num := count_observed(packed.batch):
            metrics.add_sum(OBSERVED_NLL.suffix, -output.observed_logprobs.detach().sum(), num)


def check_reduction(node: str, unit: Unit, reduction: str | None) -> str:
    """Return the reduction if a loss of this unit can have it.

    Raises:
        RecipeError: if it cannot.
    """
    pattern = REDUCTIONS.get(unit, "")
    if reduction is None or re.fullmatch(pattern, reduction) is None:
        known = pattern.replace("|", ", ").replace(r"[1-9]\d*", "N")
        raise RecipeError(
            f"node {node!r}: a loss per {unit} cannot be reduced by {reduction!r}; set reduce to {known}"
        )
    return reduction


def entry_weights(reduction: str, packed: PackedBatch, totals: Mapping[Unit, int]) -> Tensor:
    """Return the weight of each entry of the loss; 0 where nothing is learned.

    Args:
        totals: tokens, samples and groups that count in the whole minibatch, over all ranks.

    Returns:
        `[T]`, `[S]` or `[P]`, by the reduction's unit. `token-sum/N` divides by the constant N; `seq-mean-*`
        by the number of samples; `seq-mean-token-mean` also by each sample's learned tokens, and `seq-mean`
        by its sequences.
    """

    def of_samples(column: str) -> Tensor:
        return to_tensor(packed.batch.columns[column].values, packed.input_ids.device).clamp(min=1)

    is_counted = COUNT in packed.batch.columns
    if reduction == "group-mean" and is_counted:
        raise RunError("mask= with whole numbers counts samples, so the loss cannot be per group")
    if reduction == "group-mean":
        return packed.valid[Unit.GROUP] / totals[Unit.GROUP]
    if reduction == "seq-mean":
        samples = packed.valid[Unit.SEQUENCE] / of_samples(NUM_SEQUENCES) / totals[Unit.SEQUENCE]
        return samples * of_samples(COUNT) if is_counted else samples
    tokens = packed.valid[Unit.TOKEN].float()
    if is_counted:
        tokens = tokens * of_samples(COUNT)[packed.seqs.index]
    if reduction == "token-mean":
        return tokens / max(totals[Unit.TOKEN], 1)  # observed tokens may be all that there are
    if reduction.startswith("token-sum/"):
        return tokens / int(reduction.removeprefix("token-sum/"))
    if reduction == "seq-mean-token-mean":
        tokens = tokens / of_samples(NUM_LEARNED)[packed.seqs.index]
    return tokens / max(totals[Unit.SEQUENCE], 1)
