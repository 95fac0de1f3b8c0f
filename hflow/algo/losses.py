"""Losses of policies, critics and reward models, to be minimized. They are not reduced over entries.

Three policies give log-probs of the same tokens: **theta** is being trained, **prox** is the policy at the
start of the step, **behav** generated the tokens. All functions are elementwise: arguments and results have
the shape `[T]`, or `[S]` for ratios of sequences (GSPO), or `[P]` for pairs. Ratios are bounded
(`ratios.MAX_LOG_RATIO`).

Tokens whose update lowers the policy's entropy most: those with a large covariance.

A token that is likely and has a large advantage becomes likelier still, and the entropy falls by about the
covariance of log-probs and advantages over the batch. A few tokens make up most of it.

Source: Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models". All
functions take a whole minibatch. Shapes: T packed tokens.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from hflow.algo.off_policy import binary_divergence, limit_weights
from hflow.algo.ratios import bounded, policy_ratio
from hflow.types import Sequences


def clipped_surrogate(
    theta: Tensor,
    behav: Tensor,
    advantages: Tensor,
    clip: float,
    *,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """Return PPO's loss: `-min(ratio A, clip(ratio, 1 - clip, 1 + clip_high) A)`.

    `ratio = exp(theta - behav)`.

    Args:
        theta: log-probs with gradient.
        behav: log-probs of the policy that generated the tokens.
        advantages: positive if the token should become more likely.
        clip: largest distance of the ratio below 1.
        clip_high: largest distance of the ratio above 1. None: `clip`. DAPO's "clip-higher" sets it.
        dual_clip: c > 1. Where A < 0, the surrogate is at least `c A` (Ye et al. 2020, equation 5). None: no
            bound.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", equation 7.
    """
    ratio = policy_ratio(theta, behav)
    clipped = ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def is_clipped(
    theta: Tensor, prox: Tensor, advantages: Tensor, clip: float, clip_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return a mask of the tokens without a gradient, as PPO's clipped branch is the active one.

    A ratio below `1 - clip` is clipped only if A < 0, and one above `1 + clip_high` only if A > 0. Elsewhere
    the minimum takes the branch that is not clipped.

    Args:
        theta: log-probs of the policy that is trained.
        prox: log-probs of the policy that ratios are clipped around.
        advantages: advantages of the same shape.
        clip: largest distance of the ratio below 1.
        clip_high: largest distance of the ratio above 1. None: `clip`.

    Returns:
        Two bool tensors: clipped below, and clipped above.

    Source: Schulman et al. 2017, equation 7 and figure 1.
    """
    ratio = policy_ratio(theta, prox).detach()
    high = clip if clip_high is None else clip_high
    return (ratio < 1 - clip) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)


def cispo_surrogate(
    theta: Tensor, prox: Tensor, advantages: Tensor, clip: float, *, clip_high: float | None = None
) -> Tensor:
    """Return the loss of CISPO: `-sg(clip(ratio, 1 - clip, 1 + clip_high)) A theta`.

    The clipped ratio is a weight without gradient (sg), so that every token keeps a gradient.

    Args:
        theta: log-probs with gradient.
        prox: log-probs of the policy that ratios are relative to.
        advantages: positive if the token should become more likely.
        clip: largest distance of the weight below 1. The paper sets no lower limit: 1.
        clip_high: largest distance of the weight above 1. None: `clip`.

    Source: MiniMax 2025, "MiniMax-M1", equations 4 and 5.
    """
    high = clip if clip_high is None else clip_high
    weight = policy_ratio(theta, prox).detach().clamp(1 - clip, 1 + high)
    return -weight * advantages * theta


def sapo_surrogate(
    theta: Tensor, prox: Tensor, advantages: Tensor, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """Return the loss of SAPO, whose gate closes softly: `-4 / tau sigmoid(tau (ratio - 1)) A`.

    At ratio 1 its gradient is that of the ratio; it falls to 0 on both sides.

    Args:
        theta: log-probs with gradient.
        prox: log-probs of the policy that ratios are relative to.
        advantages: positive if the token should become more likely.
        tau_positive: tau where A > 0. A larger tau closes the gate sooner.
        tau_negative: tau elsewhere. Negative advantages raise the logits of many tokens, so theirs is larger.

    Source: Gao et al. 2025, "Soft adaptive policy optimization", the gate function.
    """
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    return -4 / tau * torch.sigmoid(tau * (policy_ratio(theta, prox) - 1)) * advantages


def is_diverged(
    theta: Tensor,
    behav: Tensor,
    advantages: Tensor,
    max_divergence: float,
    kind: Literal["tv", "kl"],
    *,
    symmetric: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return a mask of the tokens that DPPO drops: they diverged, and their gradient would take them further.

    Args:
        theta: log-probs of the policy that is trained.
        behav: log-probs of the policy that generated the tokens.
        advantages: advantages of the same shape.
        max_divergence: largest divergence of a token that is trained in any direction.
        kind: see `binary_divergence`.
        symmetric: drop all that diverged, also where the gradient would bring them back.

    Returns:
        Two bool tensors: too unlikely already (A < 0), and too likely already (A > 0).
    """
    far = binary_divergence(theta, behav, kind) > max_divergence
    gap = (theta - behav).detach()
    if symmetric:
        return far & (gap < 0), far & (gap > 0)
    return far & (gap < 0) & (advantages < 0), far & (gap > 0) & (advantages > 0)


def dppo_surrogate(
    theta: Tensor,
    prox: Tensor,
    behav: Tensor,
    advantages: Tensor,
    max_divergence: float,
    kind: Literal["tv", "kl"] = "tv",
    *,
    symmetric: bool = False,
) -> Tensor:
    """Return the loss of DPPO: `-ratio A`, and 0 for tokens outside the trust region (`is_diverged`).

    The region is one of probabilities and not of ratios, so that rare tokens are not clipped at once.

    Args:
        theta: log-probs with gradient.
        prox: log-probs of the policy that ratios are relative to.
        behav: log-probs of the policy that generated the tokens, from which divergences are measured.
        advantages: positive if the token should become more likely.
        max_divergence: the size of the region.
        kind: `tv` or `kl`, see `binary_divergence`.
        symmetric: see `is_diverged`.

    Source: Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning", DPPO.
    """
    low, high = is_diverged(theta, behav, advantages, max_divergence, kind, symmetric=symmetric)
    return reinforce_surrogate(theta, prox, advantages).masked_fill(low | high, 0)


def reinforce_surrogate(theta: Tensor, prox: Tensor, advantages: Tensor) -> Tensor:
    """Return `-ratio A`: REINFORCE with importance weights, which nothing clips.

    On fresh tokens the gradient is that of REINFORCE, `-A grad(theta)`.

    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement
    learning"; the weight as in Schulman et al. 2017, equation 6.
    """
    return -policy_ratio(theta, prox) * advantages


def vespo_surrogate(
    theta: Tensor,
    behav: Tensor,
    advantages: Tensor,
    seqs: Sequences,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """Return the loss of VESPO, `-sg(phi(W)) A theta`, and `phi(W) = W^k exp(lambda (1 - W))`, both `[T]`.

    W is the ratio of the whole sequence, theta / behav, without a mean over its length. The kernel phi is 1
    at W = 1, largest at `W = k / lambda`, and goes to 0 on both sides.

    Args:
        theta: `[T]`, log-probs with gradient.
        behav: `[T]`, log-probs of the policy that generated the tokens.
        advantages: `[T]`, positive if the token should become more likely.
        seqs: the layout of the batch.
        k_positive: k where A > 0.
        lambda_positive: lambda where A > 0.
        k_negative: k elsewhere.
        lambda_negative: lambda elsewhere.

    Source: Shen et al. 2026, "VESPO: variational sequence-level soft policy optimization for stable
    off-policy LLM training" (arXiv 2602.10693), the reshaping kernel.
    """
    log_ratio = seqs.widen(bounded(seqs.sum(theta - behav))).detach()
    k = torch.where(advantages > 0, k_positive, k_negative)
    decay = torch.where(advantages > 0, lambda_positive, lambda_negative)
    phi = (k * log_ratio + decay * (1 - log_ratio.exp())).exp()
    return -phi * advantages * theta, phi


def is_off_policy(drift: Tensor, advantages: Tensor, limit: float) -> Tensor:
    """Return a mask of what off-policy sequence masking leaves out: A < 0, of a sequence that drifted.

    A bad answer that the policy would not give any more has little to teach, and pushes far.

    Args:
        drift: the mean of `log(behav / theta)` over the tokens of each sequence `[S]`, or of each token's
            sequence `[T]`.
        advantages: advantages of the same shape.
        limit: the largest drift of a sequence that is trained, in nats: delta of the paper.

    Returns:
        bool, of the same shape.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2", off-policy sequence masking.
    """
    return (advantages < 0) & (drift > limit)


def dro_loss(theta: Tensor, prox: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """Return the loss of DRO: `-A theta + beta / 2 (theta - prox)^2`.

    The advantage A is in the place of the paper's `r - V`. It needs no ratio and may train samples of any
    policy. Its minimum for one token is at `theta = prox + A / beta`.

    Args:
        theta: log-probs with gradient.
        prox: log-probs of the policy to stay near.
        advantages: positive if the token should become more likely.
        beta: weight of the distance.

    Source: Richemond et al. 2024, "Offline regularised reinforcement learning for large language models
    alignment": its squared error, expanded and divided by beta, without what does not depend on theta.
    """
    return -advantages * theta + beta / 2 * (theta - prox).square()


def clipped_log_ratio(
    theta: Tensor, prox: Tensor, advantages: Tensor, clip: float, clip_high: float | None = None
) -> Tensor:
    """Return the log-ratio of each token, clipped where its sequence would leave the range: GMPO.

    The mean over a sequence's tokens is the logarithm of GMPO's ratio. Like PPO's minimum, only what moves
    further in the advantage's direction is clipped.

    Args:
        theta: log-probs with gradient.
        prox: log-probs of the policy that ratios are relative to.
        advantages: the advantage of each token's sequence.
        clip: largest log-ratio below 0, in nats.
        clip_high: largest log-ratio above 0, in nats. None: `clip`.

    Source: Zhao et al. 2025, "Geometric-mean policy optimization", equation 4.
    """
    log_ratio = bounded(theta - prox)
    clipped = log_ratio.clamp(-clip, clip if clip_high is None else clip_high)
    return torch.where(advantages < 0, torch.maximum(log_ratio, clipped), torch.minimum(log_ratio, clipped))


def behav_weight(
    prox: Tensor, behav: Tensor, cap: float | None, over_cap: Literal["mask", "truncate"] = "mask"
) -> Tensor:
    """Return the weight `exp(prox - behav)`, which corrects a loss for the policy that generated the tokens.

    Args:
        prox: log-probs of the policy for which the loss is right.
        behav: log-probs of the policy that generated the tokens.
        cap: largest weight. None: no limit but that of all ratios.
        over_cap: the weight of tokens with a larger one. `mask`: 0, and they still count in the mean (masked
            importance sampling); `truncate`: the cap (truncated importance sampling).

    Returns:
        Weights without gradient.

    Source: the cap is AReaL's (Fu et al. 2025), truncation that of IMPALA (Espeholt et al. 2018, section
    4.1).
    """
    return limit_weights(policy_ratio(prox, behav).detach(), None, cap, over_cap)[0]


def decoupled_surrogate(
    theta: Tensor,
    prox: Tensor,
    behav: Tensor,
    advantages: Tensor,
    clip: float,
    behav_weight_cap: float | None = None,
    *,
    over_cap: Literal["mask", "truncate"] = "mask",
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """Return PPO's loss clipped around prox and corrected for the policy that generated the tokens.

    `-w min(ratio A, clip(ratio, 1 - clip, 1 + clip_high) A)` with `ratio = exp(theta - prox)` and
    `w = exp(prox - behav)`, which has no gradient. With prox = behav it is PPO's loss.

    Args:
        theta: log-probs with gradient.
        prox: log-probs under the weights at the start of the step.
        behav: log-probs of the policy that generated the tokens.
        advantages: positive if the token should become more likely.
        clip: largest distance of the ratio below 1.
        behav_weight_cap: largest w, see `behav_weight`.
        over_cap: what happens to a larger one, see `behav_weight`.
        clip_high: largest distance of the ratio above 1. None: `clip`.
        dual_clip: see `clipped_surrogate`.

    Source: Hilton et al. 2022, "Batch size-invariance for policy optimization", equation 4.
    """
    loss = clipped_surrogate(theta, prox, advantages, clip, clip_high=clip_high, dual_clip=dual_clip)
    return behav_weight(prox, behav, behav_weight_cap, over_cap) * loss


def loglinear_prox(theta: Tensor, behav: Tensor, versions: Tensor, v_prox: float, v_theta: float) -> Tensor:
    """Approximate prox log-probs by interpolation between behav and theta, without a forward pass.

    `prox = behav + a (theta - behav)`, without gradient, with `a = (v_prox - v) / (v_theta - v)` clamped to
    [0, 1]. v is the version of the weights that generated the token; a = 0 where `v_theta <= v` and on tokens
    that were not generated (version -1).

    Args:
        theta: `[T]`, log-probs under the weights that are trained.
        behav: `[T]`, log-probs recorded at generation.
        versions: int `[T]`, versions of the weights that generated the tokens.
        v_prox: version of the weights at the start of the step.
        v_theta: version of the weights now: `v_prox + i / u` at update i of the u updates of a step.

    Returns:
        Log-probs `[T]`.
    """
    age = (v_theta - versions).to(theta.dtype)
    alpha = ((v_prox - versions) / age.clamp(min=torch.finfo(theta.dtype).tiny)).clamp(0, 1)
    alpha = alpha.masked_fill((age <= 0) | (versions < 0), 0)
    return behav + alpha * (theta.detach() - behav)


def cross_entropy(logprobs: Tensor) -> Tensor:
    """Return the negative log-likelihood of the tokens, `-log p`: supervised fine-tuning."""
    return -logprobs


def dft_loss(logprobs: Tensor) -> Tensor:
    """Return the loss of dynamic fine-tuning, `-sg(p) log p`: the cross entropy, weighed by the probability.

    The gradient of the cross entropy is that of a reward of `1 / p`, which unlikely tokens dominate. The
    weight without gradient (sg) makes it that of a constant reward.

    Args:
        logprobs: log-probs with gradient.

    Source: Wu et al. 2025, "On the generalization of SFT: a reinforcement learning perspective with reward
    rectification", the loss of tokens.
    """
    return -logprobs.detach().exp() * logprobs


def clipped_value_loss(
    values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None, huber_delta: float | None = None
) -> Tensor:
    """Return the clipped value loss `max((V - R)^2, (V_clip - R)^2) / 2`.

    `V_clip` is V clamped to a distance of `clip` from the old value.

    Args:
        values: V with gradient.
        old_values: V at the start of the step.
        targets: the returns R.
        clip: largest distance from the old value at which the gradient is kept. None: no limit, so that the
            loss is `(V - R)^2 / 2`.
        huber_delta: an error e above it counts `delta (|e| - delta / 2)` in the place of `e^2 / 2`, so that
            outliers have a bounded gradient (Huber 1964, "Robust estimation of a location parameter"). None:
            squared errors.

    Source: the value loss of OpenAI's PPO2 (baselines), see Engstrom et al. 2020, section 2.
    """
    loss = _error_loss(values - targets, huber_delta)
    if clip is None:
        return loss
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(loss, _error_loss(clipped - targets, huber_delta))


def _error_loss(error: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return error.square() / 2
    return torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=huber_delta)


def pairwise_loss(margin: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return `-log sigmoid(margin)`: the chosen answer is preferred with probability `sigmoid(margin)`.

    A reward model is trained on a margin of scores, a policy (DPO) on a margin of log-ratios to a reference.

    Args:
        margin: the margin of the chosen answer over the rejected one.
        label_smoothing: the probability s that a label is wrong:
            `-(1 - s) log sigmoid(margin) - s log sigmoid(-margin)` (Mitchell 2023, "A note on DPO with noisy
            preferences": conservative DPO).

    Source: Bradley and Terry 1952; Ouyang et al. 2022, "Training language models to follow
    instructions with human feedback", equation 1; Rafailov et al. 2023, "Direct preference
    optimization", equation 7.
    """
    loss = -torch.nn.functional.logsigmoid(margin)
    if not label_smoothing:
        return loss
    return (1 - label_smoothing) * loss - label_smoothing * torch.nn.functional.logsigmoid(-margin)


def ipo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return IPO's loss `(c - r - 1 / (2 beta))^2`, which stops at a finite gap where DPO's grows for ever.

    Args:
        chosen: c, the mean log-ratio to the reference of the chosen answer's tokens.
        rejected: r, the same of the rejected answer.
        beta: tau of the paper, the weight of the KL to the reference.

    Source: Azar et al. 2023, "A general theoretical paradigm to understand learning from human preferences",
    equation 17. The means in the place of sums are what its authors computed, as TRL has it from them.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def hinge_loss(margin: Tensor) -> Tensor:
    """Return `max(0, 1 - margin)`, which stops where the margin is 1.

    Source: Zhao et al. 2023, "SLiC-HF", the calibration loss; on log-ratios to a reference as in Liu et al.
    2023, "Statistical rejection sampling improves preference optimization".
    """
    return (1 - margin).relu()


def robust_loss(margin: Tensor, label_smoothing: float) -> Tensor:
    """Return the unbiased estimate of `pairwise_loss` under labels of which a share is wrong: robust DPO.

    `-((1 - s) log sigmoid(margin) - s log sigmoid(-margin)) / (1 - 2 s)`. Its mean over labels that are wrong
    with probability s is the loss under right ones.

    Args:
        margin: the margin of the answer that is labelled as chosen.
        label_smoothing: the probability s that a label is wrong, below 0.5.

    Source: Chowdhury et al. 2024, "Provably robust DPO: aligning language models with noisy feedback", the
    loss of rDPO.
    """
    right, wrong = pairwise_loss(margin), pairwise_loss(-margin)
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


def exo_loss(margin: Tensor, label_smoothing: float) -> Tensor:
    """Return the reverse KL from the policy's preference to the labels': EXO on pairs.

    `q log(q / (1 - s)) + (1 - q) log((1 - q) / s)` with `q = sigmoid(margin)`. DPO is the forward KL.

    Args:
        margin: the margin of the chosen answer over the rejected one.
        label_smoothing: the probability s that a label is wrong, more than 0.

    Source: Ji et al. 2024, "Towards efficient exact optimization of language model alignment", the loss of
    EXO for preferences.
    """
    log_q, log_rest = (torch.nn.functional.logsigmoid(x) for x in (margin, -margin))
    kl_right = log_q.exp() * (log_q - math.log1p(-label_smoothing))
    return kl_right + log_rest.exp() * (log_rest - math.log(label_smoothing))


def nca_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the loss of noise contrastive alignment on pairs, which also keeps the chosen answer likely.

    `-log sigmoid(c) - (log sigmoid(-c) + log sigmoid(-r)) / 2`.

    Args:
        chosen: c, beta times the log-ratio to the reference of the chosen answer.
        rejected: r, the same of the rejected answer.

    Source: Chen et al. 2024, "Noise contrastive alignment of language models with explicit rewards", the loss
    NCA for K = 2 preferences.
    """
    return pairwise_loss(chosen) + (pairwise_loss(-chosen) + pairwise_loss(-rejected)) / 2


def apo_loss(chosen: Tensor, rejected: Tensor, kind: Literal["zero", "down"]) -> Tensor:
    """Return a loss of anchored preference optimization, which says in which direction each answer moves.

    Args:
        chosen: c, beta times the log-ratio to the reference of the chosen answer.
        rejected: r, the same of the rejected answer.
        kind: `zero`: `sigmoid(r) - sigmoid(c)`, the chosen answer becomes likelier, for one that is better
            than the policy's own. `down`: `sigmoid(c) - sigmoid(c - r)`, both become less likely, the
            rejected one more so, for a policy that is better than both.

    Source: D'Oosterlinck et al. 2024, "Anchored preference optimization and contrastive revisions", the
    losses APO-zero and APO-down.
    """
    if kind == "zero":
        return rejected.sigmoid() - chosen.sigmoid()
    return chosen.sigmoid() - (chosen - rejected).sigmoid()


def kto_loss(log_ratio: Tensor, reference_point: Tensor, desirable: Tensor, beta: float) -> Tensor:
    """Return the loss of KTO on single answers that are labelled as good or bad.

    `1 - sigmoid(beta (h - z))` for good answers, and `1 - sigmoid(beta (z - h))` for bad ones.

    Args:
        log_ratio: h, the log-ratio to the reference of the answer.
        reference_point: z, the KL of the policy from the reference, 0 or more, without gradient.
        desirable: True for good answers.
        beta: weight of the KL to the reference that the loss implies.

    Source: Ethayarajh et al. 2024, "KTO: model alignment as prospect theoretic optimization", equation 8,
    without the weights of good and bad answers.
    """
    gain = beta * (log_ratio - reference_point)
    return 1 - torch.where(desirable, gain, -gain).sigmoid()


def orpo_loss(chosen: Tensor, rejected: Tensor, odds_coef: float) -> Tensor:
    """Return the loss of ORPO: `-log p(chosen) - odds_coef log sigmoid(log(odds(chosen) / odds(rejected)))`.

    p is the geometric mean of an answer's token probabilities, and `odds = p / (1 - p)`.

    Args:
        chosen: the mean log-prob of the chosen answer's tokens.
        rejected: the mean log-prob of the rejected answer's tokens.
        odds_coef: lambda of the paper.

    Source: Hong et al. 2024, "ORPO: monolithic preference optimization without reference model", equations 6
    and 7.
    """
    return -chosen + odds_coef * pairwise_loss(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logprobs: Tensor) -> Tensor:
    """Return `log(p / (1 - p))`, of a p that is at least a rounding error below 1."""
    return logprobs - (-torch.expm1(logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps))).log()


def token_covariance(logprobs: Tensor, advantages: Tensor, seqs: Sequences) -> Tensor:
    """Return each token's part of the covariance of log-probs and advantages, float64 `[T]`.

    `(log p - mean(log p)) (A - mean(A))`, with means over the learned tokens. It is 0 elsewhere.

    Args:
        logprobs: `[T]`, under the policy that is trained.
        advantages: `[T]`.
        seqs: the layout of the minibatch.
    """
    mask = seqs.loss_mask
    gaps = [(x.detach().double() - x[mask].detach().double().mean()) for x in (logprobs, advantages)]
    return (gaps[0] * gaps[1]).masked_fill(~mask, 0)


def largest_share(values: Tensor, seqs: Sequences, share: float) -> Tensor:
    """Return a mask `[T]` of the share of learned tokens with the largest values: KL-Cov's choice.

    `floor(share N)` of the N learned tokens, and at least one. Of equal values the first are taken.
    """
    return _first(values.masked_fill(~seqs.loss_mask, -torch.inf), seqs.loss_mask, share, seqs)


def random_share(
    values: Tensor, random: Tensor, seqs: Sequences, share: float, lower: float, upper: float
) -> Tensor:
    """Return a random share of the tokens, drawn from those with values between bounds: Clip-Cov's choice.

    Args:
        values: `[T]`.
        random: `[T]`, numbers from 0 to 1. The tokens with the smallest are taken.
        seqs: the layout of the minibatch.
        share: `floor(share N)` of the N learned tokens are taken, and at least one; fewer if fewer are within
            the bounds.
        lower: the lower bound of the values; a value equal to it is outside.
        upper: the upper bound of the values; a value equal to it is outside.

    Returns:
        bool `[T]`.
    """
    candidates = seqs.loss_mask & (values > lower) & (values < upper)
    return _first(-random.double(), candidates, share, seqs)


def _first(keys: Tensor, candidates: Tensor, share: float, seqs: Sequences) -> Tensor:
    """Return the candidates with the largest keys, `floor(share N)` of them and at least one."""
    count = (share * seqs.loss_mask.sum().double()).long().clamp(min=1)  # the host need not know it
    order = keys.masked_fill(~candidates, -torch.inf).argsort(descending=True, stable=True)
    is_first = torch.arange(len(order), device=order.device) < count
    return torch.zeros_like(candidates).scatter(0, order, is_first) & candidates
