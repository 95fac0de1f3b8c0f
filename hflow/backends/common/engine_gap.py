"""How far the engine's log-probs are from the trainer's for the same tokens and the same weights.

An engine draws a token from its own distribution and records its log-prob, `behav`. The trainer's kernels
and dtype give another number, `theta`, for the same weights. The difference biases a policy's gradient, as if
the tokens were slightly stale, so each train step measures it. Only tokens that were drawn with the version
of the weights that the trainer's forward pass used are compared: with `prox="recompute"` or `"metrics"` in
the pass that computed the proximal log-probs, otherwise in the train step's passes before its first update.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from hflow.algo import kl_k3
from hflow.backends.common.inputs import PackedBatch
from hflow.backends.common.metrics import MetricAccumulator
from hflow.backends.common.prox import PROX, UpdateProgress
from hflow.backends.interface import ENGINE_GAP, ENGINE_GAP_MAX, ENGINE_KL, NodeCall
from hflow.data.batch_arguments import get_column, to_tensor
from hflow.types import Output

BEHAV, VERSIONS = "behav_logprobs", "versions"


def add_engine_gap(
    call: NodeCall, output: Output, packed: PackedBatch, progress: UpdateProgress, metrics: MetricAccumulator
) -> None:
    """Compare the learned tokens of a micro-batch and add the differences to the metrics.

    Nothing is added for nodes that do not read what the engine recorded, nor if no token can be compared.
    """
    if not {BEHAV, VERSIONS} <= {read.field for read in call.reads}:
        return
    columns = packed.batch.columns
    drawn_now = np.asarray(columns[VERSIONS].values) == progress.step
    positions = np.flatnonzero(np.asarray(columns["loss_mask"].values) & drawn_now)
    trainer = _trainer_logprobs(call, output, packed, progress) if len(positions) else None
    if trainer is None:
        return
    chosen = to_tensor(positions, trainer.device)
    theta = trainer[chosen].float()
    behav = to_tensor(get_column(packed.batch, BEHAV).values, trainer.device)[chosen].float()
    gap = (theta - behav).abs()
    metrics.add_entries(ENGINE_GAP.suffix, gap)
    metrics.add_entries(ENGINE_GAP_MAX.suffix, gap)
    metrics.add_entries(ENGINE_KL.suffix, kl_k3(behav, theta))


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
