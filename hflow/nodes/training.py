"""Train nodes: losses of policies, critics and reward models."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from hflow.dsl import checked_by, first_pass, train
from hflow.dsl.bodies import BodyCheck
from hflow.dsl.lazy import algo
from hflow.types import Metrics, Output, PerGroup, PerSequence, PerToken, Sequences, Tensor

PolicyLoss = Literal["ppo", "cispo", "sapo", "dppo-tv", "dppo-kl", "reinforce", "dro"]
"""Losses of `actor_train`; `docs/algorithms.md` says when to use which."""

_LOSSES_OF_KNOB: Mapping[str, tuple[str, ...]] = {
    "clip": ("ppo", "cispo"),
    "clip_high": ("ppo", "cispo"),
    "dual_clip": ("ppo",),
    "tau_positive": ("sapo",),
    "tau_negative": ("sapo",),
    "max_divergence": ("dppo-tv", "dppo-kl"),
    "dro_beta": ("dro",),
}
"""Knob of `actor_train` -> the losses that use it."""


def _check_policy_loss(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    """Return what is wrong with the knobs of a policy's loss, and how to fix it."""
    for name in ("clip", "clip_high"):
        if (knobs.get(name) or 0) < 0:
            return f"{name} is {knobs[name]}; it must be 0 or more"
    for name in ("behav_weight_cap", "tau_positive", "tau_negative", "max_divergence", "dro_beta"):
        value = knobs.get(name)
        if value is not None and value <= 0:
            optional = ", or null" if name == "behav_weight_cap" else ""
            return f"{name} is {value}; it must be more than 0{optional}"
    if knobs.get("dual_clip") is not None and knobs["dual_clip"] <= 1:
        return f"dual_clip is {knobs['dual_clip']}; it must be more than 1, or null"
    if knobs.get("kl_coef") and "ref_logprobs" not in reads:
        return "kl_coef needs ref_logprobs. List use(nodes.ref_inf, REF)"
    return None


_TOKEN_CAP, _SEQUENCE_CAP = 5.0, 2.0
"""Defaults of `behav_weight_cap`, for weights of tokens and of sequences."""


def _with_weight_check(cap: float, check: BodyCheck) -> BodyCheck:
    """Return a check that also refuses knobs of the weight `exp(prox - behav)` that have no effect.

    Args:
        cap: the default of `behav_weight_cap`.
        check: of the node's other knobs.
    """

    def check_all(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
        if knobs["over_cap"] != "mask" and knobs["behav_weight_cap"] is None:
            return "over_cap has no effect without a cap. Set behav_weight_cap, or remove over_cap"
        if knobs["prox"] == "none" and knobs["behav_weight_cap"] not in (None, cap):
            return "behav_weight_cap has no effect with prox=none, where the weight is 1. Remove one of them"
        if knobs["prox"] == "none" and knobs["over_cap"] != "mask":
            return "over_cap has no effect with prox=none, where the weight is 1. Remove one of them"
        return check(knobs, reads)

    return check_all


def _check_actor_train(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    """Return the first knob that the chosen loss ignores or lacks, or another problem."""
    loss = knobs["loss"]
    for name, losses in _LOSSES_OF_KNOB.items():
        if loss not in losses and knobs[name] != _default(actor_train, name):
            return f"{name} has no effect with loss={loss}. Remove it, or set loss to {' or '.join(losses)}"
        if loss in losses and knobs[name] is None and name in ("max_divergence", "dro_beta"):
            return f"loss={loss} needs {name}. Set it, for example to {_EXAMPLES[loss]}"
    for name in ("kl_estimator", "kl_importance"):
        if knobs[name] != _default(actor_train, name) and not knobs["kl_coef"]:
            return f"{name} has no effect while kl_coef is 0. Set kl_coef, or remove {name}"
    if knobs["kl_importance"] and knobs["kl_estimator"] != "k3":
        return f"kl_importance needs kl_estimator=k3, not {knobs['kl_estimator']}, whose gradient differs"
    for name in ("behav_weight_cap", "over_cap"):
        if "behav_weights" in reads and knobs[name] != _default(actor_train, name):
            return f"{name} has no effect beside the node that returns behav_weights. Set its bounds instead"
    return _check_policy_loss(knobs, reads)


_EXAMPLES = {"dppo-tv": 0.15, "dppo-kl": 0.05, "dro": 0.1}


def _default(body: Callable[..., Any], knob: str) -> Any:
    return inspect.signature(body).parameters[knob].default


@train(reduce="token-mean")
@checked_by(_with_weight_check(_TOKEN_CAP, _check_actor_train))
def actor_train(
    out: Output,
    behav_logprobs: PerToken,
    prox_logprobs: PerToken,
    advantages: PerToken,
    ref_logprobs: PerToken | None = None,
    behav_weights: PerToken | None = None,
    *,
    loss: PolicyLoss = "ppo",
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    max_divergence: float | None = None,
    dro_beta: float | None = None,
    behav_weight_cap: float | None = _TOKEN_CAP,
    over_cap: Literal["mask", "truncate"] = "mask",
    kl_coef: float = 0.0,
    kl_estimator: Literal["k2", "k3", "k1+", "k3+"] = "k3",
    kl_importance: bool = False,
    entropy_coef: float = 0.0,
) -> tuple[PerToken, Metrics]:
    """Return a policy's loss per token: a surrogate, corrected for the policy that generated the tokens.

    The loss is `w surrogate(theta, prox) + kl_coef KL - entropy_coef H`, with `w = exp(prox - behav)`. With
    `prox="none"`, w is 1, and ratios are relative to behav.

    Args:
        out: log-probs and entropy of the policy that is trained.
        behav_logprobs: `[T]`, recorded at generation.
        prox_logprobs: `[T]`, at the start of the step.
        advantages: `[T]`.
        ref_logprobs: `[T]`, needed if `kl_coef` is not 0.
        behav_weights: `[T]`, weights in the place of w, from the node `behav_weights`.
        loss: the surrogate: `ppo` (`algo.clipped_surrogate`), `cispo`, `sapo`, `dppo-tv`, `dppo-kl` or
            `reinforce` (`algo.NAME_surrogate`), or `dro` (`algo.dro_loss`). A knob of others is refused.
        clip: ppo, cispo: largest distance of the ratio below 1.
        clip_high: ppo, cispo: largest distance of the ratio above 1. None: `clip`.
        dual_clip: ppo: bound c > 1 of the loss where advantages are negative. None: no bound.
        tau_positive: sapo: how soon the gate closes where A > 0.
        tau_negative: sapo: the same elsewhere.
        max_divergence: dppo: largest divergence of a token's probability from behav.
        dro_beta: dro: weight of the squared distance from prox.
        behav_weight_cap: largest weight `exp(prox - behav)` of a token. None: no limit.
        over_cap: give tokens with a larger weight the weight 0 (`mask`) or the cap (`truncate`).
        kl_coef: weight of the KL to the reference in the loss.
        kl_estimator: estimator of this KL. `k2`, `k1+` and `k3+` have the gradient of the KL on fresh tokens,
            k3 has that of the KL in the other direction. k1 is not allowed: the mean of its gradient is 0.
        kl_importance: multiply k3 by the ratio theta / behav, which makes value and gradient unbiased also on
            tokens of older policies (DeepSeek-AI 2025, "DeepSeek-V3.2", the unbiased KL estimate).
        entropy_coef: weight of the entropy, which is subtracted from the loss.

    Returns:
        The loss `[T]`, and metrics.
    """
    theta, prox, behav = out.logprobs, prox_logprobs, behav_logprobs
    clipped = None
    if loss == "ppo":
        entries = algo.clipped_surrogate(
            theta, prox, advantages, clip, clip_high=clip_high, dual_clip=dual_clip
        )
        clipped = algo.is_clipped(theta, prox, advantages, clip, clip_high)
    elif loss == "cispo":
        entries = algo.cispo_surrogate(theta, prox, advantages, clip, clip_high=clip_high)
        ratio = algo.policy_ratio(theta, prox)
        clipped = ratio < 1 - clip, ratio > 1 + (clip if clip_high is None else clip_high)
    elif loss == "sapo":
        entries = algo.sapo_surrogate(theta, prox, advantages, tau_positive, tau_negative)
    elif loss == "reinforce":
        entries = algo.reinforce_surrogate(theta, prox, advantages)
    elif loss == "dro":
        assert dro_beta is not None, "the check of this node's knobs refuses it"
        entries = algo.dro_loss(theta, prox, advantages, dro_beta)
    else:
        assert max_divergence is not None, "the check of this node's knobs refuses it"
        kind: Literal["tv", "kl"] = "tv" if loss == "dppo-tv" else "kl"
        entries = algo.dppo_surrogate(theta, prox, behav, advantages, max_divergence, kind)
        clipped = algo.is_diverged(theta, behav, advantages, max_divergence, kind)
    metrics = _token_metrics(out, prox, behav, behav_weight_cap if behav_weights is None else None)
    if behav_weights is None:
        behav_weights = algo.behav_weight(prox, behav, behav_weight_cap, over_cap)
    entries = entries * behav_weights
    if clipped is not None:
        metrics |= _clip_fractions(*clipped)
    if dual_clip is not None:
        metrics["dual_clip_fraction"] = (advantages < 0) & (algo.policy_ratio(theta, prox) > dual_clip)
    if kl_coef:
        assert ref_logprobs is not None, "the check of this node's knobs refuses kl_coef without ref_logprobs"
        ref_kl = algo.kl_estimate(theta, ref_logprobs, kl_estimator)
        if kl_estimator in ("k3", "k3+"):
            metrics["bounded_kl.sum"] = ref_kl >= algo.MAX_KL
        if kl_importance:
            ref_kl = algo.policy_ratio(theta, behav) * ref_kl
        metrics["ref_kl"] = ref_kl
        entries = entries + kl_coef * ref_kl
    if entropy_coef:
        entries = entries - entropy_coef * out.entropy
    return entries, metrics


def _clip_fractions(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    return {"clip_fraction": low | high, "clip_fraction_low": low, "clip_fraction_high": high}


def _over_cap(prox: Tensor, behav: Tensor, cap: float | None) -> dict[str, Tensor]:
    return {} if cap is None else {"over_cap": prox - behav > math.log(cap)}


@train(reduce="seq-mean")
@checked_by(_with_weight_check(_SEQUENCE_CAP, _check_policy_loss))
def gspo_train(
    out: Output,
    behav_logprobs: PerToken,
    prox_logprobs: PerToken,
    advantages: PerSequence,
    seqs: Sequences,
    *,
    clip: float = 3e-4,
    clip_high: float | None = 4e-4,
    behav_weight_cap: float | None = _SEQUENCE_CAP,
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
    metrics = {
        **_clip_fractions(*algo.is_clipped(theta, prox, advantages, clip, clip_high)),
        "kl": algo.kl_k3(prox_logprobs, out.logprobs, cap=None),
        "entropy": out.entropy,
        "bounded_ratios.sum": algo.is_bounded(theta, prox) | algo.is_bounded(prox, behav),
        **_over_cap(prox, behav, behav_weight_cap),
    }
    return loss, metrics


@train(reduce="seq-mean")
@checked_by(_with_weight_check(_SEQUENCE_CAP, _check_policy_loss))
def gmpo_train(
    out: Output,
    behav_logprobs: PerToken,
    prox_logprobs: PerToken,
    advantages: PerSequence,
    seqs: Sequences,
    *,
    clip: float = 0.4,
    clip_high: float | None = None,
    behav_weight_cap: float | None = _SEQUENCE_CAP,
    over_cap: Literal["mask", "truncate"] = "mask",
) -> tuple[PerSequence, Metrics]:
    """Return the loss `[S]` of GMPO: minus the advantage times the geometric mean of clipped token ratios.

    Args:
        out: log-probs and entropy of the policy that is trained.
        behav_logprobs: `[T]`, recorded at generation.
        prox_logprobs: `[T]`, at the start of the step.
        advantages: `[S]`.
        seqs: the layout of the batch.
        clip: largest log-ratio of a token below 0, in nats: a ratio of `exp(-clip)`.
        clip_high: largest log-ratio of a token above 0, in nats. None: `clip`.
        behav_weight_cap: largest weight of a sequence, as in `gspo_train`.
        over_cap: give sequences with a larger weight the weight 0 (`mask`) or the cap (`truncate`).

    Source: Zhao et al. 2025, "Geometric-mean policy optimization", equations 3 and 4.
    """
    theta, by_token = out.logprobs, seqs.widen(advantages)
    log_ratio = algo.clipped_log_ratio(theta, prox_logprobs, by_token, clip, clip_high)
    prox, behav = seqs.mean(prox_logprobs), seqs.mean(behav_logprobs)
    weight = algo.behav_weight(prox, behav, behav_weight_cap, over_cap)
    gap = (theta - prox_logprobs).detach()
    high = clip if clip_high is None else clip_high
    metrics = {
        **_clip_fractions((gap < -clip) & (by_token < 0), (gap > high) & (by_token > 0)),
        "kl": algo.kl_k3(prox_logprobs, theta, cap=None),
        "entropy": out.entropy,
        "bounded_ratios.sum": algo.is_bounded(theta, prox_logprobs),
        **_over_cap(prox, behav, behav_weight_cap),
    }
    return -weight * seqs.mean(log_ratio).exp() * advantages, metrics


def random_covariant(
    logprobs: PerToken,
    advantages: PerToken,
    random: PerToken,
    seqs: Sequences,
    *,
    share: float = 2e-4,
    lower: float = 1.0,
    upper: float = 5.0,
) -> PerToken:
    """Return the random share of a minibatch's tokens that Clip-Cov leaves out, bool `[T]`.

    Args:
        logprobs: `[T]`, under the weights of the update.
        advantages: `[T]`.
        random: `[T]`, numbers from 0 to 1.
        seqs: the layout of the minibatch.
        share: how many tokens are drawn, as a share of the minibatch's.
        lower: tokens are drawn from those whose part of the covariance is above it.
        upper: tokens are drawn from those whose part of the covariance is below it.
    """
    covariance = algo.token_covariance(logprobs, advantages, seqs)
    return algo.random_share(covariance, random, seqs, share, lower, upper)


def _check_share(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if not 0 < knobs["share"] <= 1:
        return f"share is {knobs['share']}; it must be more than 0 and at most 1"
    if "lower" in knobs and knobs["lower"] >= knobs["upper"]:
        return f"lower is {knobs['lower']} and upper is {knobs['upper']}; lower must be less than upper"
    return _check_policy_loss(knobs, reads)


def _check_kl_cov(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if knobs["cov_kl_coef"] <= 0:
        return f"cov_kl_coef is {knobs['cov_kl_coef']}; it must be more than 0"
    if knobs["minibatches"] * knobs["epochs"] == 1 and knobs["prox"] != "none":
        return (
            "its penalty has no effect with one update per step, where theta is prox. Set minibatches above 1"
        )
    return _check_share(knobs, reads)


@train(reduce="token-mean")
@first_pass(random_covariant)
@checked_by(_with_weight_check(_TOKEN_CAP, _check_share))
def clip_cov_train(
    out: Output,
    behav_logprobs: PerToken,
    prox_logprobs: PerToken,
    advantages: PerToken,
    random_covariant: PerToken,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    behav_weight_cap: float | None = _TOKEN_CAP,
    over_cap: Literal["mask", "truncate"] = "mask",
) -> tuple[PerToken, Metrics]:
    """Return PPO's loss `[T]` without a few random tokens that lower the entropy most: Clip-Cov.

    A first pass over the whole minibatch computes the covariance of log-probs and advantages, token by token
    (`algo.token_covariance`), and draws the tokens from those whose part is between `lower` and `upper`.

    Args:
        out: log-probs and entropy of the policy that is trained.
        behav_logprobs: `[T]`, recorded at generation.
        prox_logprobs: `[T]`, at the start of the step.
        advantages: `[T]`.
        random_covariant: bool `[T]`, from the first pass: tokens whose loss is 0. They count in the mean.
        clip: largest distance of the ratio below 1.
        clip_high: largest distance of the ratio above 1. None: `clip`.
        behav_weight_cap: largest weight `exp(prox - behav)` of a token, as in `actor_train`.
        over_cap: give tokens with a larger weight the weight 0 (`mask`) or the cap (`truncate`).

    Returns:
        The loss `[T]`, and metrics: `dropped.sum` is the number of tokens that were left out.

    Source: Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models",
    Clip-Cov.
    """
    loss = algo.decoupled_surrogate(
        out.logprobs,
        prox_logprobs,
        behav_logprobs,
        advantages,
        clip,
        behav_weight_cap,
        over_cap=over_cap,
        clip_high=clip_high,
    )
    metrics = {
        **_token_metrics(out, prox_logprobs, behav_logprobs, behav_weight_cap),
        **_clip_fractions(*algo.is_clipped(out.logprobs, prox_logprobs, advantages, clip, clip_high)),
        "dropped.sum": random_covariant,
    }
    return loss.masked_fill(random_covariant, 0), metrics


def most_covariant(
    logprobs: PerToken, advantages: PerToken, seqs: Sequences, *, share: float = 2e-4
) -> PerToken:
    """Return the share of a minibatch's tokens with the largest covariance, bool `[T]`: KL-Cov's choice.

    Args:
        logprobs: `[T]`, under the weights of the update.
        advantages: `[T]`.
        seqs: the layout of the minibatch.
        share: how many tokens are chosen, as a share of the minibatch's.
    """
    return algo.largest_share(algo.token_covariance(logprobs, advantages, seqs), seqs, share)


@train(reduce="token-mean")
@first_pass(most_covariant)
@checked_by(_with_weight_check(_TOKEN_CAP, _check_kl_cov))
def kl_cov_train(
    out: Output,
    behav_logprobs: PerToken,
    prox_logprobs: PerToken,
    advantages: PerToken,
    most_covariant: PerToken,
    *,
    cov_kl_coef: float = 1.0,
    behav_weight_cap: float | None = _TOKEN_CAP,
    over_cap: Literal["mask", "truncate"] = "mask",
) -> tuple[PerToken, Metrics]:
    """Return `-ratio A`, with a KL penalty on the tokens that lower the entropy most: KL-Cov.

    Nothing is clipped. A first pass over the whole minibatch computes the covariance of log-probs and
    advantages, token by token (`algo.token_covariance`), and takes the largest ones.

    Args:
        out: log-probs and entropy of the policy that is trained.
        behav_logprobs: `[T]`, recorded at generation.
        prox_logprobs: `[T]`, at the start of the step.
        advantages: `[T]`.
        most_covariant: bool `[T]`, from the first pass: tokens with a penalty.
        cov_kl_coef: weight of the penalty `|theta - prox|`. It has no gradient while theta is prox, so it
            needs several updates per step.
        behav_weight_cap: largest weight `exp(prox - behav)` of a token, as in `actor_train`.
        over_cap: give tokens with a larger weight the weight 0 (`mask`) or the cap (`truncate`).

    Returns:
        The loss `[T]`, and metrics: `penalised.sum` is the number of tokens with the penalty.

    Source: Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models",
    KL-Cov; the penalty is that of the authors' program.
    """
    theta = out.logprobs
    loss = algo.reinforce_surrogate(theta, prox_logprobs, advantages)
    loss = loss + cov_kl_coef * (theta - prox_logprobs).abs().masked_fill(~most_covariant, 0)
    metrics = {
        **_token_metrics(out, prox_logprobs, behav_logprobs, behav_weight_cap),
        "penalised.sum": most_covariant,
    }
    return loss * algo.behav_weight(prox_logprobs, behav_logprobs, behav_weight_cap, over_cap), metrics


def _token_metrics(out: Output, prox: Tensor, behav: Tensor, cap: float | None) -> dict[str, Tensor]:
    """Return what all losses per token report; `cap` is None if another node makes the weights."""
    theta = out.logprobs
    return {
        "kl": algo.kl_k3(prox, theta, cap=None),
        "entropy": out.entropy,
        "bounded_ratios.sum": algo.is_bounded(theta, prox) | algo.is_bounded(prox, behav),
        **_over_cap(prox, behav, cap),
    }


def _check_critic_loss(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    for name in ("clip", "huber_delta"):
        if knobs[name] is not None and knobs[name] <= 0:
            return f"{name} is {knobs[name]}; it must be more than 0, or null"
    return None


@train(reduce="token-mean")
@checked_by(_check_critic_loss)
def critic_train(
    out: Output,
    values: PerToken,
    value_targets: PerToken,
    *,
    clip: float | None = 0.2,
    huber_delta: float | None = None,
) -> tuple[PerToken, Metrics]:
    """Return half the squared error of the values, clipped around the values at the start of the step.

    Args:
        out: the values that are trained.
        values: `[T]`, at the start of the step.
        value_targets: `[T]`, the returns.
        clip: largest distance from `values` at which the gradient is kept. None: no limit.
        huber_delta: errors above it count linearly, see `algo.clipped_value_loss`. None: squared errors.

    Returns:
        The loss `[T]`, and metrics.
    """
    loss = algo.clipped_value_loss(out.values, values, value_targets, clip, huber_delta)
    metrics = {"error": (out.values - value_targets).square()}
    if clip is not None:
        metrics["clip_fraction"] = (out.values - values).abs() > clip
    return loss, metrics


@train(reduce="token-mean")
def distill_train(out: Output, teacher_ids: PerToken, teacher_logprobs: PerToken) -> tuple[PerToken, Metrics]:
    """Return the forward KL `[T]` from a teacher's likeliest tokens to the student (`algo.topk_forward_kl`).

    The samples may be anyone's: the student's own (on-policy distillation), the teacher's, or written ones.

    Args:
        out: the student.
        teacher_ids: `[T, K]`, from `topk_inf`.
        teacher_logprobs: `[T, K]`, from `topk_inf`.

    Returns:
        The loss `[T]`, and metrics: `covered`, the teacher's probability of the K tokens.
    """
    loss = algo.topk_forward_kl(out.logprobs_of(teacher_ids), teacher_logprobs)
    return loss, {"covered": teacher_logprobs.exp().sum(-1)}


@train(reduce="token-mean")
def sft_train(out: Output) -> PerToken:
    """Return the cross entropy `[T]` of the tokens."""
    return algo.cross_entropy(out.logprobs)


@train(reduce="group-mean")
def reward_train(
    out: Output, seqs: Sequences, score_margin: PerGroup | None = None
) -> tuple[PerGroup, Metrics]:
    """Return the loss `[P]` of a reward model on pairs, the chosen answer first.

    Args:
        out: the scores that are trained.
        seqs: the layout of the batch.
        score_margin: `[P]`, by how much the chosen answer's score should be larger, such as a rating of how
            much better it is. Without it: 0.

    Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback",
    equation 1; Touvron et al. 2023, "Llama 2", equation 2, for the margin.
    """
    chosen, rejected = seqs.members(out.scores)
    margin = chosen - rejected
    wanted = 0.0 if score_margin is None else score_margin
    return algo.pairwise_loss(margin - wanted), {"margin": margin, "accuracy": margin > 0}


def _check_dpo(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if knobs["beta"] <= 0:
        return f"beta is {knobs['beta']}; it must be more than 0"
    if not 0 <= knobs["label_smoothing"] < 0.5:
        return f"label_smoothing is {knobs['label_smoothing']}; it must be from 0 to less than 0.5"
    if knobs["label_smoothing"] and knobs["loss"] == "ipo":
        return "label_smoothing has no effect with loss=ipo. Remove it"
    return None


@train(reduce="group-mean")
@checked_by(_check_dpo)
def dpo(
    out: Output,
    ref_logprobs: PerToken,
    seqs: Sequences,
    *,
    beta: float = 0.1,
    loss: Literal["sigmoid", "ipo"] = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[PerGroup, Metrics]:
    """Return the loss `[P]` of direct preference optimization on pairs, the chosen answer first.

    Args:
        out: log-probs of the policy that is trained.
        ref_logprobs: `[T]`, log-probs under the reference model.
        seqs: the layout of the batch.
        beta: weight of the KL to the reference that the loss implies.
        loss: `sigmoid` is DPO's (`algo.pairwise_loss`); `ipo` is IPO's (`algo.ipo_loss`).
        label_smoothing: the probability that a label is wrong, below 0.5 (conservative DPO).

    Source: Rafailov et al. 2023, "Direct preference optimization", equation 7; Azar et al. 2023, equation 17.
    """
    chosen, rejected = seqs.members(seqs.sum(out.logprobs - ref_logprobs))
    gap = chosen - rejected
    metrics = {"margin": beta * gap, "accuracy": gap > 0}
    if loss == "ipo":
        return algo.ipo_loss(gap, beta), metrics
    return algo.pairwise_loss(beta * gap, label_smoothing), metrics
