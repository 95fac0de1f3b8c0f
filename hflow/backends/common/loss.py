"""From a forward's output to a micro-batch's share of the minibatch's loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hflow.backends.base import Call
from hflow.backends.common.inputs import Packed
from hflow.backends.common.meter import Meter
from hflow.backends.common.prox import Progress, approximation_errors, made_fields
from hflow.backends.common.reduce import entry_weights
from hflow.data.binding import bind
from hflow.data.returned import check_shape, split_result
from hflow.errors import RunError
from hflow.types import Output, Unit


@dataclass(frozen=True)
class Loss:
    """A train node's body, in one update of one step."""

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
