"""A micro-batch's loss: the body's entries, weighted so that the sum over all ranks is the minibatch's loss.

Denominators are global: the weights of all entries of a minibatch sum to 1 over all micro-batches and ranks
(except for `token-sum/N`). A micro-batch's part of the loss is `sum(weight * entry)`, and these parts add up.

Axes: S sequences, T packed tokens, P groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hflow.backends.common.engine_gap import add_engine_gap
from hflow.backends.common.inputs import PackedBatch
from hflow.backends.common.metrics import MetricAccumulator
from hflow.backends.common.prox import UpdateProgress, computed_fields, prox_errors
from hflow.backends.interface import NodeCall
from hflow.base.errors import RecipeError, RunError
from hflow.data.batch_arguments import bind_batch
from hflow.data.returned_values import split_result
from hflow.data.unpack_returns import check_shape
from hflow.types import Output, Unit

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
    """Entries of each unit that count in the whole minibatch, over all ranks."""
    progress: UpdateProgress

    def microbatch_loss(self, packed: PackedBatch, output: Output, metrics: MetricAccumulator) -> Tensor:
        """Run the body on a micro-batch, record its metrics, and return its part of the minibatch's loss.

        Raises:
            RunError: if the loss has a wrong shape or does not depend on the model.
        """
        call = self.call
        computed = computed_fields(call, output, packed, self.progress)
        result = call.body(**bind_batch(call, packed.batch, packed.seqs, output, computed))
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
        valid = packed.valid[self.unit]
        return (entries.masked_fill(~valid, 0) * entry_weights(self.reduction, packed, self.totals)).sum()


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
        reduction: one that `check_reduction` accepted.
        packed: the micro-batch.
        totals: entries of each unit that count in the whole minibatch, over all ranks.

    Returns:
        `[T]`, `[S]` or `[P]`, by the reduction's unit. `token-sum/N` divides by the constant N; `seq-mean-*`
        by the number of sequences; `seq-mean-token-mean` also by each sequence's learned tokens.
    """
    if reduction == "group-mean":
        return packed.valid[Unit.GROUP] / totals[Unit.GROUP]
    if reduction == "seq-mean":
        return packed.valid[Unit.SEQUENCE] / totals[Unit.SEQUENCE]
    tokens = packed.valid[Unit.TOKEN].float()
    if reduction == "token-mean":
        return tokens / totals[Unit.TOKEN]
    if reduction.startswith("token-sum/"):
        return tokens / int(reduction.removeprefix("token-sum/"))
    if reduction == "seq-mean-token-mean":
        tokens = tokens / packed.seqs.count().clamp(min=1)[packed.seqs.index]
    return tokens / totals[Unit.SEQUENCE]
