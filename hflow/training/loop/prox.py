"""Proximal log-probs that a train node computes itself (`prox="loglinear"`), and their error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hflow.algo import loglinear_prox
from hflow.data.batches.batch_arguments import get_column, to_tensor
from hflow.training.interface import NodeCall
from hflow.training.loop.inputs import PackedBatch
from hflow.types import Output

PROX = "prox_logprobs"


@dataclass(frozen=True)
class UpdateProgress:
    """The position of an optimizer step among those of a train step."""

    step: int
    """Version of the weights at the start of the train step."""
    update: int
    """Optimizer steps already made in this train step."""
    num_updates: int
    """Optimizer steps of this train step."""
    is_first_epoch: bool = True
    """Whether each sample is seen for the first time in this train step."""
    has_changed: bool = False
    """Whether this train step has changed the weights already."""

    @property
    def version(self) -> float:
        """Version of the current weights, `v_theta = v_prox + i / u`; `v_prox` before the first update."""
        return self.step + self.update / self.num_updates


def computed_fields(
    call: NodeCall, output: Output, packed: PackedBatch, progress: UpdateProgress
) -> dict[str, Tensor]:
    """Return the fields that the node computes itself: proximal log-probs `[T]` if `prox="loglinear"`."""
    if call.options.get("prox") != "loglinear" or all(read.field != PROX for read in call.reads):
        return {}
    return {PROX: _approximate(output.logprobs, packed, progress.step, progress.version)}


def prox_errors(
    call: NodeCall, output: Output, packed: PackedBatch, progress: UpdateProgress
) -> dict[str, Any]:
    """Return metrics that compare log-linear with recomputed proximal log-probs, if `prox="metrics"`.

    Both are absolute differences `[T]`. `prox_error` uses the current version of the weights as `v_theta`;
    `prox_error_fixed` uses `v_prox + 1` throughout the step.
    """
    if call.options.get("prox") != "metrics":
        return {}
    theta = output.logprobs.detach()
    exact = to_tensor(get_column(packed.batch, PROX).values, theta.device)
    versions = {"prox_error": progress.version, "prox_error_fixed": progress.step + 1.0}
    return {
        name: (_approximate(theta, packed, progress.step, version) - exact).abs()
        for name, version in versions.items()
    }


def _approximate(theta: Tensor, packed: PackedBatch, v_prox: float, v_theta: float) -> Tensor:
    behav = to_tensor(get_column(packed.batch, "behav_logprobs").values, theta.device)
    versions = to_tensor(get_column(packed.batch, "versions").values, theta.device)
    prox = loglinear_prox(theta, behav, versions, v_prox, v_theta)
    return prox.masked_fill(~packed.seqs.loss_mask, 0)
