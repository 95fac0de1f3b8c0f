"""A rank's stage with what surrounds its forward: its schedule, its inputs and its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hflow.backends.base import Call
from hflow.backends.common.cutting import Cutting, Minibatch
from hflow.backends.common.inputs import Packed, Tokens, empty_shard, to_device, tokens_of
from hflow.backends.megatron.inputs import share_out
from hflow.backends.megatron.model import Stage
from hflow.backends.megatron.output import output_of
from hflow.backends.megatron.schedule import Schedule
from hflow.types import Output


@dataclass(frozen=True)
class Runner:
    """Everything here but `output` is called by all ranks of a replica together."""

    stage: Stage
    schedule: Schedule
    cutting: Cutting
    """The head's: agrees with the other data indices' heads."""
    touched: dict[str, set[str]] = field(default_factory=dict)
    """node -> parts of the output that its body touched so far."""

    def received(self, mine: Sequence[Minibatch] | None) -> list[Minibatch]:
        """The minibatches that this data index's head has; other ranks have None."""
        return share_out(self.stage.grid, mine, self.stage.device)

    def microbatches(self, minibatch: Minibatch) -> list[Tokens]:
        """Micro-batches on the device, as many on every rank.

        Those that a body will see, on the last stage, are `Packed`. Those behind, with which a rank takes
        part in what others do, are one token of which nothing is learned.
        """
        device, dtype = self.stage.device, self.stage.dtype
        is_last = self.stage.grid.is_last_stage
        filled = [(to_device if is_last else tokens_of)(b, device, dtype) for b in minibatch.microbatches]
        num_idle = minibatch.num_microbatches - len(filled)
        return [*filled, *[tokens_of(empty_shard(), device, dtype)] * num_idle]

    def output(self, call: Call, packed: Packed, hidden: Tensor) -> Output:
        """What the body gets, on the last stage; a collective over its tensor ranks when it is touched."""
        touched = self.touched.setdefault(call.node, set())
        return output_of(self.stage, packed, hidden, call.temperature, touched)
