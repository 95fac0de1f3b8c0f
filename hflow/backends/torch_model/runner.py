"""Runs micro-batches through the model, the same number on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.backends.common.checks import check_temperature
from hflow.backends.common.inputs import PackedBatch, empty_shard, to_device
from hflow.backends.common.microbatches import MicrobatchSplitter
from hflow.backends.interface import NodeCall
from hflow.backends.torch_model.packed_model import PackedModel
from hflow.data.batch import Batch
from hflow.types import Output

Result = TypeVar("Result")


@dataclass(frozen=True)
class TorchRunner:
    """A placed model and what surrounds its forward."""

    module: PackedModel
    device: torch.device
    dtype: torch.dtype
    group: ProcessGroup | None
    """The ranks that its weights are sharded over; None for one."""
    cutting: MicrobatchSplitter
    touched: dict[str, set[str]] = field(default_factory=dict)
    """node -> parts of the output that its body touched so far."""

    def forward(
        self, batch: Batch, call: NodeCall, consume: Callable[[PackedBatch, Output], Result]
    ) -> Result:
        """Run one prepared micro-batch; `consume` runs within the forward, on whole weights.

        Raises:
            RunError: when the policy's temperature is 0, under which nothing has a log-prob.
        """
        check_temperature(call)
        packed = to_device(batch, self.device, self.dtype)
        touched = self.touched.setdefault(call.node, set())
        result: Result = self.module(
            packed, lambda output: consume(packed, output), call.temperature, lambda: touched
        )
        return result

    def idle(self) -> Tensor:
        """Take part in a forward of the other ranks; returns a zero whose backward does the same."""
        nothing: Tensor = self.module(to_device(empty_shard(), self.device, self.dtype), None)
        return nothing
