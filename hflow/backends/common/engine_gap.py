"""How far the engine's log-probs are from the trainer's for the same tokens.

An engine draws a token from its own distribution and records its log-prob, `behav`. The trainer computes
another number, `theta`, for two reasons: its weights may be newer than those that drew the token, and its
kernels and dtype differ. Each train step measures both together (`behav_gap`), and the second alone
(`engine_gap`), on the tokens that were drawn with the version that the weights of the trainer's forward pass
have. This is the pass before the step's first update; with `prox="recompute"` or `"metrics"`, the one that
computed the proximal log-probs.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from hflow.algo import kl_k3
from hflow.backends.common.inputs import PackedBatch
from hflow.backends.common.metrics import MetricAccumulator
from hflow.backends.common.prox import PROX, UpdateProgress
from hflow.backends.interface import (
    BEHAV_GAP,
    BEHAV_GAP_MAX,
    BEHAV_KL,
    ENGINE_GAP,
    ENGINE_GAP_MAX,
    ENGINE_KL,
    NodeCall,
)
from hflow.data.batch_arguments import get_column, to_tensor
from hflow.metrics import Metric
from hflow.types import Output

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
