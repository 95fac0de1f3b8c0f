"""Policy and value losses, entry by entry; every loss is to be minimised.

The three policies (log-probs of the same tokens): **theta** is being trained, **prox** is the
weights at the start of the step, **behav** generated the tokens. All functions are elementwise,
`[T]` in and out (or `[S]`: a sequence's mean log-prob makes GSPO), and leave the reduction over
entries to the caller.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def clipped_surrogate(
    theta: Tensor, behav: Tensor, advantages: Tensor, clip: float, *, clip_high: float | None = None
) -> Tensor:
    """PPO's loss: `-min(ratio A, clip(ratio, 1 - clip, 1 + clip_high) A)`, `ratio = exp(theta - behav)`.

    Args:
        theta: log-probs with gradient.
        behav: log-probs of the policy that generated the tokens.
        advantages: positive where the token should become likelier.
        clip: how far the ratio may fall below 1.
        clip_high: how far it may rise above 1; `clip` when None (DAPO's "clip-higher" sets it).

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", equation 7.
    """
    ratio = torch.exp(theta - behav)
    clipped = ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    return -torch.minimum(ratio * advantages, clipped * advantages)


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
    """PPO's loss clipped around prox and corrected for the policy that generated the tokens.

    `-w min(ratio A, clip(ratio, 1 - clip, 1 + clip_high) A)` with `ratio = exp(theta - prox)` and
    `w = exp(prox - behav)` detached; w multiplies both branches. With prox = behav it is PPO.

    Args:
        theta: log-probs with gradient.
        prox: log-probs under the weights at the step's start.
        behav: log-probs of the policy that generated the tokens.
        advantages: positive where the token should become likelier.
        clip: how far the ratio may fall below 1.
        behav_weight_cap: the largest w; None: any.
        over_cap: what becomes of a token with a larger one. `mask`: weight 0, still counted in the mean
            (masked importance sampling); `truncate`: the cap as its weight (truncated importance sampling).
        clip_high: how far the ratio may rise above 1; `clip` when None.
        dual_clip: c > 1; where A < 0 the surrogate is at least `c A` (Ye et al. 2020, equation 5).

    Source: Hilton et al. 2022, "Batch size-invariance for policy optimization", equation 4; the
    cap is AReaL's (Fu et al. 2025), truncation that of IMPALA (Espeholt et al. 2018, section 4.1).
    """
    loss = clipped_surrogate(theta, prox, advantages, clip, clip_high=clip_high)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    weight = torch.exp(prox - behav).detach()
    if behav_weight_cap is not None:
        capped = 0.0 if over_cap == "mask" else behav_weight_cap
        weight = weight.masked_fill(weight > behav_weight_cap, capped)
    return weight * loss


def loglinear_prox(theta: Tensor, behav: Tensor, versions: Tensor, v_prox: float, v_theta: float) -> Tensor:
    """Approximate prox log-probs on the line from behav to theta, without a forward pass.

    `prox = behav + a (theta - behav)` with theta detached and `a = (v_prox - v) / (v_theta - v)`
    clamped to [0, 1], v being the version that generated the token; a = 0 where `v_theta <= v` and
    on tokens that no weights generated (version -1).

    Args:
        theta: `[T]` log-probs of the weights being trained.
        behav: `[T]` recorded log-probs.
        versions: int `[T]`.
        v_prox: version of the weights at the step's start.
        v_theta: version of the weights now: `v_prox + i / u` at update i of the step's u.
    """
    age = (v_theta - versions).to(theta.dtype)
    alpha = ((v_prox - versions) / age.clamp(min=torch.finfo(theta.dtype).tiny)).clamp(0, 1)
    alpha = alpha.masked_fill((age <= 0) | (versions < 0), 0)
    return behav + alpha * (theta.detach() - behav)


def cross_entropy(logprobs: Tensor) -> Tensor:
    """Negative log-likelihood of the tokens, `-log p`: supervised fine-tuning."""
    return -logprobs


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None) -> Tensor:
    """`max((V - R)^2, (V_clip - R)^2) / 2`, where `V_clip` is V kept within `clip` of the old one.

    Args:
        values: predictions with gradient.
        old_values: predictions at the step's start.
        targets: returns R.
        clip: how far a prediction may move in one step before its gradient stops; None: any distance,
            so that the loss is `(V - R)^2 / 2`.

    Source: the value loss of OpenAI's PPO2 (baselines), see Engstrom et al. 2020, section 2.
    """
    error = (values - targets).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - targets).square())
    return error / 2


def pairwise_loss(margin: Tensor) -> Tensor:
    """`-log sigmoid(margin)`: the chosen of two is preferred with probability `sigmoid(margin)`.

    A margin of scores trains a reward model, one of log-ratios to a reference a policy (DPO).

    Source: Bradley and Terry 1952; Ouyang et al. 2022, "Training language models to follow
    instructions with human feedback", equation 1; Rafailov et al. 2023, "Direct preference
    optimization", equation 7.
    """
    return -torch.nn.functional.logsigmoid(margin)
