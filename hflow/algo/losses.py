"""Losses of policies, critics and reward models, to be minimized. They are not reduced over entries.

Three policies give log-probs of the same tokens: **theta** is being trained, **prox** is the policy at the
start of the step, **behav** generated the tokens. All functions are elementwise: arguments and results have
the shape `[T]`, or `[S]` for ratios of sequences (GSPO), or `[P]` for pairs. Ratios are bounded
(`ratios.MAX_LOG_RATIO`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hflow.algo.ratios import policy_ratio


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
    """Return where PPO's clipped branch is the active one, so that a token has no gradient.

    A ratio below `1 - clip` is clipped only if A < 0, and one above `1 + clip_high` only if A > 0. Elsewhere
    the minimum takes the branch that is not clipped.

    Args:
        theta: log-probs of the policy that is trained.
        prox: log-probs of the policy that ratios are clipped around.
        advantages: of the same shape.
        clip: largest distance of the ratio below 1.
        clip_high: largest distance of the ratio above 1. None: `clip`.

    Returns:
        Two bool tensors: clipped below, and clipped above.

    Source: Schulman et al. 2017, equation 7 and figure 1.
    """
    ratio = policy_ratio(theta, prox).detach()
    high = clip if clip_high is None else clip_high
    return (ratio < 1 - clip) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)


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
    weight = policy_ratio(prox, behav).detach()
    if cap is None:
        return weight
    return weight.masked_fill(weight > cap, 0.0 if over_cap == "mask" else cap)


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


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None) -> Tensor:
    """Return the clipped value loss `max((V - R)^2, (V_clip - R)^2) / 2`.

    `V_clip` is V clamped to a distance of `clip` from the old value.

    Args:
        values: V with gradient.
        old_values: V at the start of the step.
        targets: the returns R.
        clip: largest distance from the old value at which the gradient is kept. None: no limit, so that the
            loss is `(V - R)^2 / 2`.

    Source: the value loss of OpenAI's PPO2 (baselines), see Engstrom et al. 2020, section 2.
    """
    error = (values - targets).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - targets).square())
    return error / 2


def pairwise_loss(margin: Tensor) -> Tensor:
    """Return `-log sigmoid(margin)`: the chosen answer is preferred with probability `sigmoid(margin)`.

    A reward model is trained on a margin of scores, a policy (DPO) on a margin of log-ratios to a reference.

    Source: Bradley and Terry 1952; Ouyang et al. 2022, "Training language models to follow
    instructions with human feedback", equation 1; Rafailov et al. 2023, "Direct preference
    optimization", equation 7.
    """
    return -torch.nn.functional.logsigmoid(margin)
