"""Where a train node's proximal log-probs come from, when it makes or judges them itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hflow.algo import loglinear_prox
from hflow.backends.common.inputs import PackedBatch
from hflow.backends.interface import NodeCall
from hflow.data.batch_arguments import column, to_tensor
from hflow.types import Output

PROX = "prox_logprobs"


@dataclass(frozen=True)
class UpdateProgress:
    """How far the weights have moved within a step."""

    step: int
    """Version of the weights at the step's start."""
    update: int
    """Updates done in this step."""
    num_updates: int

    @property
    def version(self) -> float:
        """`v_theta = v_prox + i / u`: the first update sees the weights of the step's start."""
        return self.step + self.update / self.num_updates


def made_fields(
    call: NodeCall, output: Output, packed: PackedBatch, progress: UpdateProgress
) -> dict[str, Tensor]:
    """Fields that the node makes itself: with `prox="loglinear"`, the proximal log-probs."""
    if call.options.get("prox") != "loglinear" or all(read.field != PROX for read in call.reads):
        return {}
    return {PROX: _approximate(output.logprobs, packed, progress.step, progress.version)}


def approximation_errors(
    call: NodeCall, output: Output, packed: PackedBatch, progress: UpdateProgress
) -> dict[str, Any]:
    """With `prox="metrics"`: how far log-linear prox is from the recomputed one, per token.

    `prox_error` is the library's rule, `prox_error_fixed` takes `v_theta = v_prox + 1` throughout.
    """
    if call.options.get("prox") != "metrics":
        return {}
    theta = output.logprobs.detach()
    exact = to_tensor(column(packed.batch, PROX).values, theta.device)
    versions = {"prox_error": progress.version, "prox_error_fixed": progress.step + 1.0}
    return {
        name: (_approximate(theta, packed, progress.step, version) - exact).abs()
        for name, version in versions.items()
    }


def _approximate(theta: Tensor, packed: PackedBatch, v_prox: float, v_theta: float) -> Tensor:
    behav = to_tensor(column(packed.batch, "behav_logprobs").values, theta.device)
    versions = to_tensor(column(packed.batch, "versions").values, theta.device)
    prox = loglinear_prox(theta, behav, versions, v_prox, v_theta)
    return prox.masked_fill(~packed.seqs.loss_mask, 0)
