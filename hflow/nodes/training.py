"""Train nodes: losses of policies, critics and reward models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from hflow.dsl import checked_by, first_pass, train, warned_by
from hflow.dsl.lazy import algo
from hflow.nodes.policy_loss import (
    PolicyBatch,
    clip_fractions,
    more_than_zero,
    one_update,
    sequence_loss,
    token_loss,
    warn_of_idle,
)
from hflow.types import Metrics, Output, PerGroup, PerSequence, PerToken, SeparateSequences, Sequences, Tensor


def _check_dual_clip(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if knobs["dual_clip"] is not None and knobs["dual_clip"] <= 1:
        return f"dual_clip is {knobs['dual_clip']}; it must be more than 1, or null"
    return None


def _clipped(
    theta: Tensor,
    prox: Tensor,
    advantages: Tensor,
    clip: float,
    clip_high: float | None,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's loss and how much is clipped, of tokens or sequences."""
    loss = algo.clipped_surrogate(theta, prox, advantages, clip, clip_high=clip_high, dual_clip=dual_clip)
    metrics = clip_fractions(*algo.is_clipped(theta, prox, advantages, clip, clip_high))
    if dual_clip is not None:
        metrics["dual_clip_fraction"] = (advantages < 0) & (algo.policy_ratio(theta, prox) > dual_clip)
    return loss, metrics


@train(reduce="token-mean")
@token_loss(_check_dual_clip)
def actor_train(
    policy: PolicyBatch, *, clip: float = 0.2, clip_high: float | None = None, dual_clip: float | None = None
) -> tuple[Tensor, Metrics]:
    """Return PPO's loss per token, corrected for the policy that generated the tokens.

    The loss is `w surrogate(theta, prox) + kl_coef KL - entropy_coef H`, with `w = exp(prox - behav)`. With
    `prox="none"`, w is 1, and ratios are relative to behav. The surrogate is `algo.clipped_surrogate`.

    Args:
        policy: log-probs and advantages.
        clip: largest distance of the ratio below 1.
        clip_high: largest distance of the ratio above 1. None: `clip`.
        dual_clip: bound c > 1 of the loss where advantages are negative. None: no bound.

    Returns:
        The loss `[T]`, and metrics.
    """
    return _clipped(policy.theta, policy.prox, policy.advantages, clip, clip_high, dual_clip)


@train(reduce="token-mean")
@token_loss()
def cispo_train(
    policy: PolicyBatch, *, clip: float = 0.2, clip_high: float | None = None
) -> tuple[Tensor, Metrics]:
    """Return the loss of CISPO per token (`algo.cispo_surrogate`), corrected as in `actor_train`.

    Args:
        policy: log-probs and advantages.
        clip: largest distance of the ratio below 1. The paper has no lower limit: 1.0.
        clip_high: largest distance of the ratio above 1. None: `clip`.

    Returns:
        The loss `[T]`, and metrics.
    """
    loss = algo.cispo_surrogate(policy.theta, policy.prox, policy.advantages, clip, clip_high=clip_high)
    ratio = algo.policy_ratio(policy.theta, policy.prox)
    return loss, clip_fractions(ratio < 1 - clip, ratio > 1 + (clip if clip_high is None else clip_high))


@train(reduce="token-mean")
@token_loss(more_than_zero("tau_positive", "tau_negative"))
def sapo_train(
    policy: PolicyBatch,
    seqs: SeparateSequences,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    level: Literal["token", "sequence"] = "token",
) -> tuple[Tensor, Metrics]:
    """Return the loss of SAPO per token (`algo.sapo_surrogate`), corrected as in `actor_train`.

    Args:
        policy: log-probs and advantages.
        seqs: the layout of the batch.
        tau_positive: how soon the gate closes where A > 0.
        tau_negative: how soon the gate closes elsewhere.
        level: the ratio of each token, as in the paper, or the geometric mean over its sequence, as in TRL.

    Returns:
        The loss `[T]`, and metrics.
    """
    theta, prox = policy.theta, policy.prox
    if level == "sequence":
        theta, prox = (seqs.widen(seqs.mean(x)) for x in (theta, prox))
    return algo.sapo_surrogate(theta, prox, policy.advantages, tau_positive, tau_negative), {}


def _check_dppo(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if knobs["max_divergence"] is None:
        return "it needs max_divergence. Set it, for example to 0.15 (tv) or 0.05 (kl)"
    if knobs["divergence"] == "tv" and knobs["max_divergence"] >= 1:
        return f"max_divergence={knobs['max_divergence']} drops nothing, as tv is at most 1. Set it below 1"
    return more_than_zero("max_divergence")(knobs, reads)


@train(reduce="token-mean")
@token_loss(_check_dppo)
def dppo_train(
    policy: PolicyBatch,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    max_divergence: float | None = None,
    symmetric: bool = False,
) -> tuple[Tensor, Metrics]:
    """Return the loss of DPPO per token (`algo.dppo_surrogate`), corrected as in `actor_train`.

    Args:
        policy: log-probs and advantages.
        divergence: how the change of a token's probability from behav is measured, see
            `algo.binary_divergence`.
        max_divergence: largest divergence of a token's probability from behav. It must be set.
        symmetric: also drop tokens that the gradient would bring back.

    Returns:
        The loss `[T]`, and metrics.
    """
    assert max_divergence is not None, "the check of this node's knobs refuses it"
    theta, behav, advantages = policy.theta, policy.behav, policy.advantages
    loss = algo.dppo_surrogate(
        theta, policy.prox, behav, advantages, max_divergence, divergence, symmetric=symmetric
    )
    left = algo.is_diverged(theta, behav, advantages, max_divergence, divergence, symmetric=symmetric)
    return loss, clip_fractions(*left)


@train(reduce="token-mean")
@token_loss()
def reinforce_train(policy: PolicyBatch) -> tuple[Tensor, Metrics]:
    """Return `-ratio A` per token (`algo.reinforce_surrogate`), corrected as in `actor_train`.

    Returns:
        The loss `[T]`, and metrics.
    """
    return algo.reinforce_surrogate(policy.theta, policy.prox, policy.advantages), {}


def _check_vespo(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if knobs["prox"] != "none" or "behav_weights" in reads:
        return (
            "it weighs whole sequences by theta / behav itself, so that other weights would count twice. Set "
            "prox=none, and list no node that returns behav_weights"
        )
    return more_than_zero("k_positive", "lambda_positive", "k_negative", "lambda_negative")(knobs, reads)


@train(reduce="token-mean", prox="none")
@token_loss(_check_vespo)
def vespo_train(
    policy: PolicyBatch,
    seqs: SeparateSequences,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """Return the loss of VESPO per token (`algo.vespo_surrogate`), for samples that may be stale.

    It weighs each sequence by a smooth kernel of its ratio theta / behav, in the place of clipping and of the
    weight prox / behav.

    Args:
        policy: log-probs and advantages.
        seqs: the layout of the batch.
        k_positive: power of the ratio where A > 0.
        lambda_positive: decay of the kernel where A > 0.
        k_negative: power of the ratio elsewhere.
        lambda_negative: decay of the kernel elsewhere.

    Returns:
        The loss `[T]`, and metrics: `phi`, the weights of the tokens' sequences.
    """
    kernel = (k_positive, lambda_positive, k_negative, lambda_negative)
    loss, phi = algo.vespo_surrogate(policy.theta, policy.behav, policy.advantages, seqs, *kernel)
    return loss, {"phi": phi}


def _idle_penalty(knobs: Mapping[str, Any]) -> str | None:
    if one_update(knobs) and knobs["prox"] != "none":
        return (
            "its penalty has no effect with one update per step, where theta is prox. Set minibatches above 1"
        )
    return None


def _check_dro(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if knobs["dro_beta"] is None:
        return "it needs dro_beta. Set it, for example to 0.1"
    return more_than_zero("dro_beta")(knobs, reads) or _idle_penalty(knobs)


@train(reduce="token-mean")
@token_loss(_check_dro)
def dro_train(policy: PolicyBatch, *, dro_beta: float | None = None) -> tuple[Tensor, Metrics]:
    """Return the loss of DRO per token (`algo.dro_loss`), corrected as in `actor_train`.

    Args:
        policy: log-probs and advantages.
        dro_beta: weight of the squared distance from prox. It must be set.

    Returns:
        The loss `[T]`, and metrics.
    """
    assert dro_beta is not None, "the check of this node's knobs refuses it"
    return algo.dro_loss(policy.theta, policy.prox, policy.advantages, dro_beta), {}


@train(reduce="seq-mean")
@sequence_loss(_check_dual_clip)
def gspo_train(
    policy: PolicyBatch,
    seqs: Sequences,
    *,
    clip: float = 3e-4,
    clip_high: float | None = 4e-4,
    dual_clip: float | None = None,
    by_length: bool = False,
) -> tuple[Tensor, Metrics]:
    """Return PPO's loss `[S]` on the ratio of whole sequences, `(p_theta(y) / p_prox(y)) ** (1 / |y|)`.

    Args:
        policy: log-probs of tokens, and advantages of sequences.
        seqs: the layout of the batch.
        clip: largest distance of the ratio below 1.
        clip_high: largest distance of the ratio above 1. None: `clip`.
        dual_clip: bound c > 1 of the loss where advantages are negative. None: no bound.
        by_length: multiply the loss by the number of learned tokens (LUSPO), so that the gradient of a token
            does not shrink with the length of its sequence.

    Returns:
        The loss `[S]`, and metrics. With `prox="none"` it is the loss of the paper.

    Source: Zheng et al. 2025, "Group sequence policy optimization", equations 5 and 7; Liu et al. 2026,
    "Length-unbiased sequence policy optimization" (arXiv 2602.05261), for the factor of the length.
    """
    theta, prox, behav = (seqs.mean(x) for x in (policy.theta, policy.prox, policy.behav))
    metrics = {"bounded_ratios.sum": algo.is_bounded(theta, prox) | algo.is_bounded(prox, behav)}
    loss, clipping = _clipped(theta, prox, policy.advantages, clip, clip_high, dual_clip)
    return loss * seqs.count() if by_length else loss, metrics | clipping


@train(reduce="seq-mean")
@sequence_loss()
def gmpo_train(
    policy: PolicyBatch, seqs: Sequences, *, clip: float = 0.4, clip_high: float | None = None
) -> tuple[Tensor, Metrics]:
    """Return the loss `[S]` of GMPO: minus the advantage times the geometric mean of clipped token ratios.

    Args:
        policy: log-probs of tokens, and advantages of sequences.
        seqs: the layout of the batch.
        clip: largest log-ratio of a token below 0, in nats: a ratio of `exp(-clip)`.
        clip_high: largest log-ratio of a token above 0, in nats. None: `clip`.

    Returns:
        The loss `[S]`, and metrics.

    Source: Zhao et al. 2025, "Geometric-mean policy optimization", equations 3 and 4.
    """
    theta, prox, by_token = policy.theta, policy.prox, seqs.widen(policy.advantages)
    log_ratio = algo.clipped_log_ratio(theta, prox, by_token, clip, clip_high)
    gap = (theta - prox).detach()
    high = clip if clip_high is None else clip_high
    return -seqs.mean(log_ratio).exp() * policy.advantages, {
        **clip_fractions((gap < -clip) & (by_token < 0), (gap > high) & (by_token > 0)),
        "bounded_ratios.sum": algo.is_bounded(theta, prox),
    }


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
    return None


@train(reduce="token-mean")
@token_loss(_check_share)
@first_pass(random_covariant)
def clip_cov_train(
    policy: PolicyBatch, random_covariant: PerToken, *, clip: float = 0.2, clip_high: float | None = None
) -> tuple[Tensor, Metrics]:
    """Return PPO's loss `[T]` without a few random tokens that lower the entropy most: Clip-Cov.

    A first pass over the whole minibatch computes the covariance of log-probs and advantages, token by token
    (`algo.token_covariance`), and draws the tokens from those whose part is between `lower` and `upper`. The
    loss is corrected as in `actor_train`.

    Args:
        policy: log-probs and advantages.
        random_covariant: bool `[T]`, from the first pass: tokens whose loss is 0. They count in the mean.
        clip: largest distance of the ratio below 1.
        clip_high: largest distance of the ratio above 1. None: `clip`.

    Returns:
        The loss `[T]`, and metrics: `dropped.sum` is the number of tokens that were left out.

    Source: Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models",
    Clip-Cov.
    """
    loss, metrics = _clipped(policy.theta, policy.prox, policy.advantages, clip, clip_high)
    return loss.masked_fill(random_covariant, 0), {**metrics, "dropped.sum": random_covariant}


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


def _check_kl_cov(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if problem := more_than_zero("cov_kl_coef")(knobs, reads):
        return problem
    return _idle_penalty(knobs) or _check_share(knobs, reads)


@train(reduce="token-mean")
@token_loss(_check_kl_cov)
@first_pass(most_covariant)
def kl_cov_train(
    policy: PolicyBatch, most_covariant: PerToken, *, cov_kl_coef: float = 1.0
) -> tuple[Tensor, Metrics]:
    """Return `-ratio A`, with a KL penalty on the tokens that lower the entropy most: KL-Cov.

    Nothing is clipped. A first pass over the whole minibatch computes the covariance of log-probs and
    advantages, token by token (`algo.token_covariance`), and takes the largest ones. The loss is corrected as
    in `actor_train`.

    Args:
        policy: log-probs and advantages.
        most_covariant: bool `[T]`, from the first pass: tokens with a penalty.
        cov_kl_coef: weight of the penalty `|theta - prox|`. It has no gradient while theta is prox, so it
            needs several updates per step.

    Returns:
        The loss `[T]`, and metrics: `penalised.sum` is the number of tokens with the penalty.

    Source: Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models",
    KL-Cov; the penalty is that of the authors' program.
    """
    loss = algo.reinforce_surrogate(policy.theta, policy.prox, policy.advantages)
    penalty = (policy.theta - policy.prox).abs().masked_fill(~most_covariant, 0)
    return loss + cov_kl_coef * penalty, {"penalised.sum": most_covariant}


def most_uncertain(entropy: PerToken, seqs: Sequences, *, share: float = 0.2) -> PerToken:
    """Return the share of a minibatch's tokens with the largest entropy, bool `[T]`.

    Args:
        entropy: `[T]`, under the weights of the update.
        seqs: the layout of the minibatch.
        share: how many tokens are chosen, as a share of the minibatch's.
    """
    return algo.largest_share(entropy, seqs, share)


@train(reduce="token-mean")
@token_loss(_check_share)
@first_pass(most_uncertain)
def high_entropy_train(
    policy: PolicyBatch, most_uncertain: PerToken, *, clip: float = 0.2, clip_high: float | None = None
) -> tuple[Tensor, Metrics]:
    """Return PPO's loss `[T]` on the tokens of the highest entropy alone, where the answer may fork.

    A first pass over the whole minibatch chooses them. The loss is corrected as in `actor_train`.

    Args:
        policy: log-probs and advantages.
        most_uncertain: bool `[T]`, from the first pass. The loss of the others is 0; they count in the mean.
        clip: largest distance of the ratio below 1.
        clip_high: largest distance of the ratio above 1. None: `clip`.

    Returns:
        The loss `[T]`, and metrics: `trained.sum` is the number of tokens with a loss.

    Source: Wang et al. 2025, "Beyond the 80/20 rule: high-entropy minority tokens drive effective
    reinforcement learning for LLM reasoning", the objective on the top 20 %.
    """
    loss, metrics = _clipped(policy.theta, policy.prox, policy.advantages, clip, clip_high)
    return loss.masked_fill(~most_uncertain, 0), {**metrics, "trained.sum": most_uncertain}


def _check_critic_loss(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    for name in ("clip", "huber_delta"):
        if knobs[name] is not None and knobs[name] <= 0:
            return f"{name} is {knobs[name]}; it must be more than 0, or null"
    return None


def _warn_critic_loss(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    return warn_of_idle(knobs, {"clip": 0.2}, "the values are those of its start")


@train(reduce="token-mean")
@checked_by(_check_critic_loss)
@warned_by(_warn_critic_loss)
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


def _check_distillation(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    return None if 0 <= knobs["beta"] <= 1 else f"beta is {knobs['beta']}; it must be from 0 to 1"


@train(reduce="token-mean")
@checked_by(_check_distillation)
def distill_train(
    out: Output, teacher_ids: PerToken, teacher_logprobs: PerToken, *, beta: float = 0.0
) -> tuple[PerToken, Metrics]:
    """Return the divergence `[T]` of the student from a teacher's likeliest tokens (`algo.topk_divergence`).

    The samples may be anyone's: the student's own (on-policy distillation), the teacher's, or written ones.

    Args:
        out: the student.
        teacher_ids: `[T, K]`, from `topk_inf`.
        teacher_logprobs: `[T, K]`, from `topk_inf`.
        beta: 0 is the forward KL, 1 the reverse KL, which leaves out what the student cannot learn, and
            numbers between them the generalised Jensen-Shannon divergence.

    Returns:
        The loss `[T]`, and metrics: `covered`, the teacher's probability of the K tokens.
    """
    loss = algo.topk_divergence(out.logprobs_of(teacher_ids), teacher_logprobs, beta)
    return loss, {"covered": teacher_logprobs.exp().sum(-1)}


@train(reduce="token-mean")
def sft_train(out: Output, *, loss: Literal["nll", "dft"] = "nll") -> PerToken:
    """Return the loss `[T]` of supervised fine-tuning.

    Args:
        out: log-probs of the policy that is trained.
        loss: `nll` is the cross entropy; `dft` weighs it by the token's probability (`algo.dft_loss`).
    """
    return algo.cross_entropy(out.logprobs) if loss == "nll" else algo.dft_loss(out.logprobs)


def _check_reward(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    coef = knobs["centring_coef"]
    return f"centring_coef is {coef}; it must be 0 or more" if coef < 0 else None


@train(reduce="group-mean")
@checked_by(_check_reward)
def reward_train(
    out: Output, seqs: Sequences, score_margin: PerGroup | None = None, *, centring_coef: float = 0.0
) -> tuple[PerGroup, Metrics]:
    """Return the loss `[P]` of a reward model on pairs, the chosen answer first.

    Args:
        out: the scores that are trained.
        seqs: the layout of the batch.
        score_margin: `[P]`, by how much the chosen answer's score should be larger, such as a rating of how
            much better it is. Without it: 0.
        centring_coef: weight of `(chosen + rejected)^2`, which keeps the mean of scores near 0. Pairs alone
            do not determine it.

    Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback",
    equation 1; Touvron et al. 2023, "Llama 2", equation 2, for the margin; Eisenstein et al. 2023, "Helping
    or herding?", equation 2, for the centring.
    """
    chosen, rejected = seqs.members(out.scores)
    margin = chosen - rejected
    wanted = 0.0 if score_margin is None else score_margin
    loss = algo.pairwise_loss(margin - wanted)
    metrics = {"margin": margin, "accuracy": margin > 0, "score": (chosen + rejected) / 2}
    return loss + centring_coef * (chosen + rejected).square(), metrics


_SMOOTHED = ("sigmoid", "robust", "exo_pair")
"""Losses of preferences that read `label_smoothing`. The last two need it."""


def _check_dpo(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    loss, smoothing = knobs["loss"], knobs["label_smoothing"]
    if knobs["beta"] <= 0:
        return f"beta is {knobs['beta']}; it must be more than 0"
    if not 0 <= smoothing < 0.5:
        return f"label_smoothing is {smoothing}; it must be from 0 to less than 0.5"
    if smoothing and loss not in _SMOOTHED:
        return f"label_smoothing has no effect with loss={loss}. Remove it"
    if not smoothing and loss == "robust":
        return "loss=robust without label_smoothing is loss=sigmoid. Set label_smoothing, or remove loss"
    if not smoothing and loss == "exo_pair":
        return "loss=exo_pair needs label_smoothing. Set it, for example to 0.001"
    return None


@train(reduce="group-mean")
@checked_by(_check_dpo)
def dpo(
    out: Output,
    ref_logprobs: PerToken,
    seqs: Sequences,
    *,
    beta: float = 0.1,
    loss: Literal[
        "sigmoid", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "apo_zero", "apo_down"
    ] = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[PerGroup, Metrics]:
    """Return the loss `[P]` of direct preference optimization on pairs, the chosen answer first.

    Args:
        out: log-probs of the policy that is trained.
        ref_logprobs: `[T]`, log-probs under the reference model.
        seqs: the layout of the batch.
        beta: weight of the KL to the reference that the loss implies.
        loss: `sigmoid` is DPO's (`algo.pairwise_loss`), `ipo` `algo.ipo_loss`, `hinge` `algo.hinge_loss`,
            `robust` `algo.robust_loss`, `exo_pair` `algo.exo_loss`, `nca_pair` `algo.nca_loss`, and
            `apo_zero` and `apo_down` `algo.apo_loss`.
        label_smoothing: the probability that a label is wrong, below 0.5: of `sigmoid` (conservative DPO),
            `robust` and `exo_pair`.

    Source: Rafailov et al. 2023, "Direct preference optimization", equation 7.
    """
    log_ratio = out.logprobs - ref_logprobs
    chosen, rejected = seqs.members(beta * seqs.sum(log_ratio))
    mean_chosen, mean_rejected = seqs.members(seqs.mean(log_ratio))
    margin = chosen - rejected
    losses = {
        "sigmoid": lambda: algo.pairwise_loss(margin, label_smoothing),
        "ipo": lambda: algo.ipo_loss(mean_chosen, mean_rejected, beta),
        "hinge": lambda: algo.hinge_loss(margin),
        "robust": lambda: algo.robust_loss(margin, label_smoothing),
        "exo_pair": lambda: algo.exo_loss(margin, label_smoothing),
        "nca_pair": lambda: algo.nca_loss(chosen, rejected),
        "apo_zero": lambda: algo.apo_loss(chosen, rejected, "zero"),
        "apo_down": lambda: algo.apo_loss(chosen, rejected, "down"),
    }
    return losses[loss](), {"margin": margin, "accuracy": margin > 0}


def reference_point(logprobs: PerToken, ref_logprobs: PerToken, seqs: Sequences) -> PerSequence:
    """Return the KL of the policy from the reference for `kto`, the same `[S]` for the whole minibatch.

    It is the mean log-ratio of the unrelated answers, the second of each group, and at least 0.

    Args:
        logprobs: `[T]`, under the weights of the update.
        ref_logprobs: `[T]`, log-probs under the reference model.
        seqs: the layout of the minibatch.
    """
    _, unrelated = seqs.members(seqs.sum(logprobs - ref_logprobs))
    return unrelated.mean().clamp(min=0).expand(len(seqs))


@train(reduce="group-mean")
@checked_by(more_than_zero("beta", "desirable_weight", "undesirable_weight"))
@first_pass(reference_point)
def kto(
    out: Output,
    ref_logprobs: PerToken,
    desirable: PerSequence,
    reference_point: PerSequence,
    seqs: Sequences,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[PerGroup, Metrics]:
    """Return the loss `[P]` of KTO on answers that are good or bad, each with an unrelated one (`kto_view`).

    A first pass over the whole minibatch computes the reference point from the unrelated answers, which are
    not learned.

    Args:
        out: log-probs of the policy that is trained.
        ref_logprobs: `[T]`, log-probs under the reference model.
        desirable: `[S]`, not 0 for good answers.
        reference_point: `[S]`, from the first pass.
        seqs: the layout of the batch.
        beta: weight of the KL to the reference that the loss implies.
        desirable_weight: factor of the loss of good answers.
        undesirable_weight: factor of the loss of bad answers.

    Returns:
        The loss `[P]`, and metrics: the `reference_point`, and `accuracy`, the share of good answers above it
        and bad ones below.

    Source: Ethayarajh et al. 2024, "KTO: model alignment as prospect theoretic optimization", equation 8.
    """
    log_ratio, _ = seqs.members(seqs.sum(out.logprobs - ref_logprobs))
    is_good, point = (seqs.members(x)[0] for x in (desirable != 0, reference_point))
    weight = undesirable_weight + (desirable_weight - undesirable_weight) * is_good
    loss = weight * algo.kto_loss(log_ratio, point, is_good, beta)
    return loss, {"reference_point": point, "accuracy": (log_ratio > point) == is_good}


@train(reduce="group-mean")
@checked_by(more_than_zero("odds_coef"))
def orpo(out: Output, seqs: Sequences, *, odds_coef: float = 0.1) -> tuple[PerGroup, Metrics]:
    """Return the loss `[P]` of ORPO on pairs, the chosen answer first (`algo.orpo_loss`).

    It learns the chosen answer and prefers it at once, without a reference model.

    Args:
        out: log-probs of the policy that is trained.
        seqs: the layout of the batch.
        odds_coef: weight of the preference.

    Returns:
        The loss `[P]`, and metrics: `margin` is the difference of the mean log-probs.
    """
    chosen, rejected = seqs.members(seqs.mean(out.logprobs))
    margin = chosen - rejected
    return algo.orpo_loss(chosen, rejected, odds_coef), {"margin": margin, "accuracy": margin > 0}
