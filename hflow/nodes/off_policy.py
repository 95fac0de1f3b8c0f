"""Compute nodes that correct for samples of another policy: weights and masks, for `actor_train`.

They read `prox_logprobs`, so the train node needs `prox="recompute"`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from hflow.dsl import checked_by, compute
from hflow.dsl.lazy import algo
from hflow.types import Metrics, PerToken, Sequences


def _check_weights(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    lower, upper = knobs["lower"], knobs["upper"]
    for name, bound in (("lower", lower), ("upper", upper)):
        if bound is not None and bound <= 0:
            return f"{name} is {bound}; it must be more than 0, or null"
    if lower is not None and upper is not None and lower >= upper:
        return f"lower is {lower} and upper is {upper}; lower must be less than upper"
    if lower is None and upper is None and knobs["outside"] != "truncate":
        return f"outside={knobs['outside']} has no effect without bounds. Set lower or upper"
    return None


@compute(returns="behav_weights")
@checked_by(_check_weights)
def behav_weights(
    behav_logprobs: PerToken,
    prox_logprobs: PerToken,
    seqs: Sequences,
    *,
    level: Literal["token", "sequence", "geometric"] = "token",
    lower: float | None = None,
    upper: float | None = 2.0,
    outside: Literal["truncate", "mask"] = "truncate",
    normalise: bool = False,
) -> tuple[PerToken, Metrics]:
    """Return the weight of each token that corrects for the policy that generated it; `actor_train` uses it.

    Args:
        behav_logprobs: `[T]`, recorded at generation.
        prox_logprobs: `[T]`, at the start of the step.
        seqs: the layout of the batch.
        level: the ratio of the token, of its sequence, or the geometric mean over its sequence.
        lower: smallest weight. None: no limit.
        upper: largest weight. None: no limit.
        outside: what happens to others: the nearest bound (`truncate`), or 0 (`mask`). Tokens of weight 0
            count in the mean of the loss; to leave them out, use `is_trusted`.
        normalise: divide the weights by their mean over the batch's learned tokens (self-normalised
            importance sampling), so that the size of a step does not depend on them.

    Returns:
        Weights `[T]`, and metrics: the mean `weight` before the bounds, the share `outside` of tokens outside
        the bounds, and the effective sample size `ess`, as a share of the tokens.
    """
    raw = algo.importance_weights(prox_logprobs, behav_logprobs, seqs, level)
    weights, is_outside = algo.limit_weights(raw, lower, upper, outside)
    weights = weights.masked_fill(~seqs.loss_mask, 0)
    learned = weights[seqs.loss_mask]
    if normalise and bool(learned.sum() > 0):
        weights = weights / learned.mean()
    ess = float(algo.effective_sample_size(learned))
    return weights, {"weight": raw, "outside": is_outside & seqs.loss_mask, "ess": ess}


def _check_trust(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    lower, upper, statistic = knobs["lower"], knobs["upper"], knobs["statistic"]
    if statistic != "k1":
        if lower is not None:
            return f"lower has no effect with statistic={statistic}, which is never negative. Remove it"
        if statistic == "tv" and upper >= 1:
            return f"upper={upper} has no effect with statistic=tv, which is at most 1. Set it below 1"
        return f"upper is {upper}; it must be more than 0" if upper <= 0 else None
    if lower is None:
        return "statistic=k1 has both signs and needs lower. Set it, for example to -0.02"
    if lower >= upper:
        return f"lower is {lower} and upper is {upper}; lower must be less than upper"
    return None


@compute(returns="is_trusted")
@checked_by(_check_trust)
def is_trusted(
    behav_logprobs: PerToken,
    prox_logprobs: PerToken,
    seqs: Sequences,
    *,
    statistic: Literal["k1", "k2", "k3", "binary_kl", "tv"] = "k3",
    extent: Literal["token", "sequence-sum", "sequence-mean", "sequence-max"] = "sequence-mean",
    lower: float | None = None,
    upper: float = 0.02,
) -> tuple[PerToken, Metrics]:
    """Return a mask of tokens near enough to the policy that generated them; `mask="is_trusted"` uses it.

    Args:
        behav_logprobs: `[T]`, recorded at generation.
        prox_logprobs: `[T]`, at the start of the step.
        seqs: the layout of the batch.
        statistic: what is compared with the bounds: in nats the log-ratio (`k1`), or the KL by `k2` or `k3`;
            of the event "this token" the KL (`binary_kl`) or total variation (`tv`, the change of the token's
            probability), see `algo.binary_divergence`.
        extent: the statistic of the token, or its sum, mean or largest value over the sequence.
        lower: smallest value, for `k1`.
        upper: largest value.

    Returns:
        bool `[T]`, and metrics: the mean `divergence`, and the shares `rejected` of tokens and
        `rejected_sequences` of sequences with such a token.
    """
    values = algo.divergence_of(prox_logprobs, behav_logprobs, seqs, statistic, extent)
    kept = (values <= upper) & seqs.loss_mask
    if lower is not None:
        kept = kept & (values >= lower)
    return kept, {"divergence": values, **_rejections(kept, seqs)}


def _check_m2po(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    limit = knobs["max_second_moment"]
    return f"max_second_moment is {limit}; it must be more than 0" if limit <= 0 else None


@compute(returns="is_trusted")
@checked_by(_check_m2po)
def m2po_mask(
    behav_logprobs: PerToken, prox_logprobs: PerToken, seqs: Sequences, *, max_second_moment: float = 0.04
) -> tuple[PerToken, Metrics]:
    """Return a mask of the tokens that M2PO trains (`algo.second_moment_mask`); `mask="is_trusted"` uses it.

    Args:
        behav_logprobs: `[T]`, recorded at generation.
        prox_logprobs: `[T]`, at the start of the step.
        seqs: the layout of the batch.
        max_second_moment: largest mean of squared log-ratios over the tokens that are kept.

    Returns:
        bool `[T]`, and metrics: the mean `second_moment` of all tokens, and shares as of `is_trusted`.
    """
    kept = algo.second_moment_mask(prox_logprobs, behav_logprobs, seqs, max_second_moment)
    moment = (prox_logprobs - behav_logprobs).square()
    return kept, {"second_moment": moment, **_rejections(kept, seqs)}


def _rejections(kept: PerToken, seqs: Sequences) -> Metrics:
    rejected = ~kept & seqs.loss_mask
    return {"rejected": rejected, "rejected_sequences": seqs.sum(rejected.float()) > 0}
