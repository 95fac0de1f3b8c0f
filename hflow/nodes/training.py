"""Losses of policies and critics."""

from __future__ import annotations

from hflow.dsl import train
from hflow.errors import RecipeError
from hflow.lazy import algo
from hflow.types import Metrics, Output, PerGroup, PerToken, Sequences


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
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> tuple[PerToken, Metrics]:
    """The decoupled surrogate; with `prox="none"` it is PPO's. KL to the reference and entropy may join."""
    theta = out.logprobs
    loss = algo.decoupled_surrogate(
        theta,
        prox_logprobs,
        behav_logprobs,
        advantages,
        clip,
        behav_weight_cap,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    if kl_coef:
        if ref_logprobs is None:
            raise RecipeError("actor_train: kl_coef needs ref_logprobs: list use(nodes.ref_inf, REF)")
        loss = loss + kl_coef * algo.kl_k3(theta, ref_logprobs)
    if entropy_coef:
        loss = loss - entropy_coef * out.entropy
    ratio = (theta - prox_logprobs).exp()
    outside = (ratio < 1 - clip) | (ratio > 1 + (clip if clip_high is None else clip_high))
    return loss, {"clip_fraction": outside, "kl": algo.kl_k3(theta, prox_logprobs), "entropy": out.entropy}


@train(reduce="token-mean")
def critic_train(out: Output, values: PerToken, value_targets: PerToken, *, clip: float = 0.2) -> PerToken:
    """Squared error of the value, clipped around the value at the step's start."""
    return algo.clipped_value_loss(out.values, values, value_targets, clip)


@train(reduce="token-mean")
def sft_train(out: Output) -> PerToken:
    """Cross entropy of the learned tokens."""
    return algo.cross_entropy(out.logprobs)


@train(reduce="group-mean")
def dpo(
    out: Output, ref_logprobs: PerToken, seqs: Sequences, *, beta: float = 0.1
) -> tuple[PerGroup, Metrics]:
    """Direct preference optimisation on pairs, the chosen first.

    Source: Rafailov et al. 2023, "Direct preference optimization", equation 7.
    """
    from torch.nn.functional import logsigmoid

    chosen, rejected = seqs.members(seqs.sum(out.logprobs - ref_logprobs))
    margin = beta * (chosen - rejected)
    return -logsigmoid(margin), {"margin": margin, "accuracy": margin > 0}
