"""From a forward's output to a micro-batch's share of the minibatch's loss."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hflow.backends.common.inputs import PackedBatch
from hflow.backends.common.metrics import MetricAccumulator
from hflow.backends.common.prox import UpdateProgress, approximation_errors, made_fields
from hflow.backends.interface import NodeCall
from hflow.data.batch_arguments import bind
from hflow.data.unpack_returns import check_shape, split_result
from hflow.errors import RecipeError, RunError
from hflow.types import Output, Unit

# -------------------- How entries of a loss become one number: weights that sum to 1 over the whole
# minibatch.
# The denominators are global, so a micro-batch's share of the loss is `sum(weight * loss)` and
# shares of all micro-batches on all ranks simply add up.


REDUCTIONS: Mapping[Unit, str] = {
    Unit.TOKEN: r"token-mean|seq-mean-token-sum|seq-mean-token-mean|token-sum/[1-9]\d*",
    Unit.SEQUENCE: "seq-mean",
    Unit.GROUP: "group-mean",
}
"""The reductions of a loss of each unit, as patterns."""


def check_reduction(node: str, unit: Unit, reduce: str | None) -> str:
    """The reduction, if it is one of the loss's unit.

    Raises:
        RecipeError: when it is not.
    """
    pattern = REDUCTIONS.get(unit, "")
    if reduce is None or re.fullmatch(pattern, reduce) is None:
        known = pattern.replace("|", ", ").replace(r"[1-9]\d*", "N")
        raise RecipeError(f"node {node!r}: a loss per {unit} cannot be reduced by {reduce!r}; known: {known}")
    return reduce


def entry_weights(reduce: str, packed: PackedBatch, totals: Mapping[Unit, int]) -> Tensor:
    """The weight of each entry of the loss; 0 where nothing is learned.

    Args:
        reduce: a reduction that `check_reduction` let pass.
        packed: the micro-batch.
        totals: entries of each unit that count in the whole minibatch, over all ranks.

    Returns:
        `[T]`, `[S]` or `[P]` as the reduction's unit is. `token-sum/N` divides by the constant N,
        `seq-mean-*` by the number of sequences, `seq-mean-token-mean` by each one's learned tokens
        first.
    """
    if reduce == "group-mean":
        return packed.valid[Unit.GROUP] / totals[Unit.GROUP]
    if reduce == "seq-mean":
        return packed.valid[Unit.SEQUENCE] / totals[Unit.SEQUENCE]
    tokens = packed.valid[Unit.TOKEN].float()
    if reduce == "token-mean":
        return tokens / totals[Unit.TOKEN]
    if reduce.startswith("token-sum/"):
        return tokens / int(reduce.removeprefix("token-sum/"))
    if reduce == "seq-mean-token-mean":
        tokens = tokens / packed.seqs.count().clamp(min=1)[packed.seqs.index]
    return tokens / totals[Unit.SEQUENCE]


@dataclass(frozen=True)
class Loss:
    """A train node's body, in one update of one step."""

    call: NodeCall
    name: str
    unit: Unit
    reduce: str
    totals: dict[Unit, int]
    progress: UpdateProgress

    def share(self, packed: PackedBatch, output: Output, meter: MetricAccumulator) -> Tensor:
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
