"""Train nodes: losses of policies, critics and reward models."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

from hflow.dsl import checked_by, train
from hflow.lazy import algo
from hflow.types import Metrics, Output, PerGroup, PerSequence, PerToken, Sequences


def _check_policy_loss(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    """Return what is wrong with the knobs of a policy's loss, and how to fix it."""
    clip, high, cap, dual_clip = (
        knobs.get(name) for name in ("clip", "clip_high", "behav_weight_cap", "dual_clip")
    )
    for name, value in (("clip", clip), ("clip_high", high)):
        if value is not None and value < 0:
            return f"{name} is {value}; it must be 0 or more"
    if cap is not None and cap <= 0:
        return f"behav_weight_cap is {cap}; it must be more than 0, or null"
    if dual_clip is not None and dual_clip <= 1:
        return f"dual_clip is {dual_clip}; it must be more than 1, or null"
    if knobs.get("kl_coef") and "ref_logprobs" not in reads:
        return "kl_coef needs ref_logprobs. List use(nodes.ref_inf, REF)"
    return None


@train(reduce="token-mean")
@checked_by(_check_policy_loss)
def actor_train(
    out: Output,
    behav_logprobs: PerToken,
    prox_logprobs: PerToken,
    advantages: PerToken,
    ref_logprobs: PerToken | None = None,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    behav_weight_cap: float | None = 5.0,
    over_cap: Literal["mask", "truncate"] = "mask",
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: Literal["k2", "k3"] = "k3",
    entropy_coef: float = 0.0,
) -> tuple[PerToken, Metrics]:
    """Return the decoupled PPO loss per token; with `prox="none"` it is PPO's loss.

    Args:
        out: log-probs and entropy of the policy that is trained.
        behav_logprobs: `[T]`, recorded at generation.
        prox_logprobs: `[T]`, at the start of the step.
        advantages: `[T]`.
        ref_logprobs: `[T]`, needed if `kl_coef` is not 0.
        clip: largest distance of the ratio below 1.
        clip_high: largest distance of the ratio above 1. None: `clip`.
        behav_weight_cap: largest weight `exp(prox - behav)` of a token. None: no limit.
        over_cap: give tokens with a larger weight the weight 0 (`mask`) or the cap (`truncate`).
        dual_clip: bound c > 1 of the loss where advantages are negative. None: no bound.
        kl_coef: weight of the KL to the reference in the loss.
        kl_estimator: estimator of this KL. k1 is not allowed: the mean of its gradient is 0 for any
            reference.
        entropy_coef: weight of the entropy, which is subtracted from the loss.

    Returns:
        The loss `[T]`, and metrics.
    """
    theta = out.logprobs
    loss = algo.decoupled_surrogate(
        theta,
        prox_logprobs,
        behav_logprobs,
        advantages,
        clip,
        behav_weight_cap,
        over_cap=over_cap,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    low, high = algo.is_clipped(theta, prox_logprobs, advantages, clip, clip_high)
    bounded = algo.is_bounded(theta, prox_logprobs) | algo.is_bounded(prox_logprobs, behav_logprobs)
    metrics = {
        "clip_fraction": low | high,
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "kl": algo.kl_k3(prox_logprobs, theta),
        "entropy": out.entropy,
        "bounded_ratios.sum": bounded,
    }
    if dual_clip is not None:
        metrics["dual_clip_fraction"] = (advantages < 0) & (
            algo.policy_ratio(theta, prox_logprobs) > dual_clip
        )
    if behav_weight_cap is not None:
        metrics["over_cap"] = prox_logprobs - behav_logprobs > math.log(behav_weight_cap)
    if kl_coef:
        assert ref_logprobs is not None, "the check of this node's knobs refuses kl_coef without ref_logprobs"
        metrics["ref_kl"] = algo.kl_estimate(theta, ref_logprobs, kl_estimator)
        if kl_estimator == "k3":
            metrics["bounded_kl.sum"] = metrics["ref_kl"] >= algo.MAX_KL
        loss = loss + kl_coef * metrics["ref_kl"]
    if entropy_coef:
        loss = loss - entropy_coef * out.entropy
    return loss, metrics


@train(reduce="seq-mean")
@checked_by(_check_policy_loss)
def gspo_train(
    out: Output,
    behav_logprobs: PerToken,
    prox_logprobs: PerToken,
    advantages: PerSequence,
    seqs: Sequences,
    *,
    clip: float = 3e-4,
    clip_high: float | None = 4e-4,
    behav_weight_cap: float | None = 2.0,
    over_cap: Literal["mask", "truncate"] = "mask",
) -> tuple[PerSequence, Metrics]:
    """Return PPO's loss `[S]` on the ratio of whole sequences, `(p_theta(y) / p_prox(y)) ** (1 / |y|)`.

    Args:
        out: log-probs and entropy of the policy that is trained.
        behav_logprobs: `[T]`, recorded at generation.
        prox_logprobs: `[T]`, at the start of the step.
        advantages: `[S]`.
        seqs: the layout of the batch.
        clip: largest distance of the ratio below 1.
        clip_high: largest distance of the ratio above 1. None: `clip`.
        behav_weight_cap: largest weight `(p_prox(y) / p_behav(y)) ** (1 / |y|)` of a sequence. None: no
            limit.
        over_cap: give sequences with a larger weight the weight 0 (`mask`) or the cap (`truncate`).

    Returns:
        The loss `[S]`, and metrics. With `prox="none"` it is the loss of the paper.

    Source: Zheng et al. 2025, "Group sequence policy optimization", equations 5 and 7.
    """
    theta, prox, behav = (seqs.mean(x) for x in (out.logprobs, prox_logprobs, behav_logprobs))
    loss = algo.decoupled_surrogate(
        theta, prox, behav, advantages, clip, behav_weight_cap, over_cap=over_cap, clip_high=clip_high
    )
    low, high = algo.is_clipped(theta, prox, advantages, clip, clip_high)
    metrics = {
        "clip_fraction": low | high,
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "kl": algo.kl_k3(prox_logprobs, out.logprobs),
        "entropy": out.entropy,
        "bounded_ratios.sum": algo.is_bounded(theta, prox) | algo.is_bounded(prox, behav),
    }
    if behav_weight_cap is not None:
        metrics["over_cap"] = prox - behav > math.log(behav_weight_cap)
    return loss, metrics


@train(reduce="token-mean")
def critic_train(
    out: Output, values: PerToken, value_targets: PerToken, *, clip: float | None = 0.2
) -> tuple[PerToken, Metrics]:
    """Return half the squared error of the values, clipped around the values at the start of the step.

    Args:
        out: the values that are trained.
        values: `[T]`, at the start of the step.
        value_targets: `[T]`, the returns.
        clip: largest distance from `values` at which the gradient is kept. None: no limit.

    Returns:
        The loss `[T]`, and metrics.
    """
    loss = algo.clipped_value_loss(out.values, values, value_targets, clip)
    metrics = {"error": (out.values - value_targets).square()}
    if clip is not None:
        metrics["clip_fraction"] = (out.values - values).abs() > clip
    return loss, metrics


@train(reduce="token-mean")
def sft_train(out: Output) -> PerToken:
    """Return the cross entropy `[T]` of the tokens."""
    return algo.cross_entropy(out.logprobs)


@train(reduce="group-mean")
def reward_train(out: Output, seqs: Sequences) -> tuple[PerGroup, Metrics]:
    """Return the loss `[P]` of a reward model on pairs, the chosen answer first.

    Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback",
    equation 1.
    """
    chosen, rejected = seqs.members(out.scores)
    return algo.pairwise_loss(chosen - rejected), {
        "margin": chosen - rejected,
        "accuracy": chosen > rejected,
    }


@train(reduce="group-mean")
def dpo(
    out: Output, ref_logprobs: PerToken, seqs: Sequences, *, beta: float = 0.1
) -> tuple[PerGroup, Metrics]:
    """Return the loss `[P]` of direct preference optimization on pairs, the chosen answer first.

    Args:
        out: log-probs of the policy that is trained.
        ref_logprobs: `[T]`, log-probs under the reference model.
        seqs: the layout of the batch.
        beta: weight of the KL to the reference that the loss implies.

    Source: Rafailov et al. 2023, "Direct preference optimization", equation 7.
    """
    chosen, rejected = seqs.members(seqs.sum(out.logprobs - ref_logprobs))
    margin = beta * (chosen - rejected)
    return algo.pairwise_loss(margin), {"margin": margin, "accuracy": margin > 0}
