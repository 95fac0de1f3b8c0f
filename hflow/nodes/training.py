"""Losses of policies and critics."""

from __future__ import annotations

import math
from typing import Literal

from hflow.dsl import train
from hflow.errors import RecipeError
from hflow.lazy import algo
from hflow.types import Metrics, Output, PerGroup, PerSequence, PerToken, Sequences


@train(reduce="token-mean")
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
    """The decoupled surrogate; with `prox="none"` it is PPO's. KL to the reference and entropy may join.

    In a loss k1 is no choice: its gradient is 0 on average, whatever the reference.
    """
    _check(behav_weight_cap, dual_clip)
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
    ratio = (theta - prox_logprobs).exp()
    outside = (ratio < 1 - clip) | (ratio > 1 + (clip if clip_high is None else clip_high))
    metrics = {"clip_fraction": outside, "kl": algo.kl_k3(theta, prox_logprobs), "entropy": out.entropy}
    if behav_weight_cap is not None:
        metrics["over_cap"] = prox_logprobs - behav_logprobs > math.log(behav_weight_cap)
    if kl_coef:
        if ref_logprobs is None:
            raise RecipeError("actor_train: kl_coef needs ref_logprobs: list use(nodes.ref_inf, REF)")
        metrics["ref_kl"] = algo.kl_estimate(theta, ref_logprobs, kl_estimator)
        loss = loss + kl_coef * metrics["ref_kl"]
    if entropy_coef:
        loss = loss - entropy_coef * out.entropy
    return loss, metrics


def _check(behav_weight_cap: float | None, dual_clip: float | None) -> None:
    """Refuse bounds that would take every token, or turn the loss around."""
    if behav_weight_cap is not None and behav_weight_cap <= 0:
        raise RecipeError(f"actor_train: behav_weight_cap is {behav_weight_cap}; it must be above 0, or null")
    if dual_clip is not None and dual_clip <= 1:
        raise RecipeError(f"actor_train: dual_clip is {dual_clip}; it must be above 1, or null")


@train(reduce="seq-mean")
def gspo_train(
    out: Output,
    behav_logprobs: PerToken,
    advantages: PerSequence,
    seqs: Sequences,
    *,
    clip: float = 3e-4,
    clip_high: float | None = 4e-4,
) -> tuple[PerSequence, Metrics]:
    """PPO's loss on the ratio of whole sequences, `(p_theta(y) / p_behav(y)) ** (1 / |y|)`.

    Source: Zheng et al. 2025, "Group sequence policy optimization", equations 5 and 7.
    """
    theta, behav = seqs.mean(out.logprobs), seqs.mean(behav_logprobs)
    loss = algo.clipped_surrogate(theta, behav, advantages, clip, clip_high=clip_high)
    ratio = (theta - behav).exp()
    outside = (ratio < 1 - clip) | (ratio > 1 + (clip if clip_high is None else clip_high))
    return loss, {"clip_fraction": outside, "entropy": out.entropy}


@train(reduce="token-mean")
def critic_train(
    out: Output, values: PerToken, value_targets: PerToken, *, clip: float | None = 0.2
) -> tuple[PerToken, Metrics]:
    """Squared error of the value, clipped around the value at the step's start; `clip=null`: not clipped."""
    loss = algo.clipped_value_loss(out.values, values, value_targets, clip)
    metrics = {"error": (out.values - value_targets).square()}
    if clip is not None:
        metrics["clip_fraction"] = (out.values - values).abs() > clip
    return loss, metrics


@train(reduce="token-mean")
def sft_train(out: Output) -> PerToken:
    """Cross entropy of the learned tokens."""
    return algo.cross_entropy(out.logprobs)


@train(reduce="group-mean")
def reward_train(out: Output, seqs: Sequences) -> tuple[PerGroup, Metrics]:
    """A reward model from pairs, the chosen first: its score is to be the higher one.

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
    """Direct preference optimisation on pairs, the chosen first.

    Source: Rafailov et al. 2023, "Direct preference optimization", equation 7.
    """
    chosen, rejected = seqs.members(seqs.sum(out.logprobs - ref_logprobs))
    margin = beta * (chosen - rejected)
    return algo.pairwise_loss(margin), {"margin": margin, "accuracy": margin > 0}
