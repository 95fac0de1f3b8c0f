"""Estimators of the KL divergence, a controller of its weight, and entropy.

`kl_*(logprobs, ref_logprobs)` estimate KL(p || ref) in nats from tokens x that were drawn from **p**, the
policy of the first argument. Both arguments are log-probs of these tokens, of any shape; the result has the
same shape. `r = ref(x) / p(x)`. For tokens that were drawn from the second policy, exchange the arguments,
which estimates the KL in the other direction.

Source: John Schulman 2020, "Approximating KL divergence", for k1, k2 and k3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hflow.algo.ratios import MAX_LOG_RATIO, bounded

MAX_KL = 10.0
"""Largest value in nats of k3 for one token, as in verl and OpenRLHF. Unbounded, k3 is 2.6e10 where ref gives
a token 24 nats more than p. A token above the bound has no gradient."""
_MAX_ERROR = 0.2
_TINY_REST = 1e-6


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `-log r` for tokens drawn from p: unbiased, high variance, can be negative."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `(log r)^2 / 2` for tokens drawn from p: biased, low variance, never negative.

    The mean of its gradient is the gradient of the KL.
    """
    return (logprobs - ref_logprobs).square() / 2


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, cap: float | None = MAX_KL) -> Tensor:
    """Return `(r - 1) - log r` for tokens drawn from p: unbiased, low variance, never negative.

    Args:
        logprobs: log-probs under p.
        ref_logprobs: log-probs under ref.
        cap: largest value, up to which the estimate is unbiased. It is for losses and rewards. None: no limit
            but that of r, as of all ratios; for what is measured or compared with a bound.
    """
    log_ratio = ref_logprobs - logprobs
    values = torch.expm1(bounded(log_ratio)) - log_ratio.clamp(max=MAX_LOG_RATIO)
    return values if cap is None else values.clamp(max=cap)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(p || ref) with `k1`, `k2` or `k3`, from tokens drawn from p, the first argument.

    `k1+` and `k3+` have the value of k1 and k3 and the gradient of k2. The means of k1 and k3 are the KL, but
    those of their gradients are not its gradient (that of k1 is 0), since they leave out that p draws the
    tokens; that of k2 is.

    Raises:
        KeyError: for another name.

    Source: Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL".
    """
    values = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}[estimator.removesuffix("+")](logprobs, ref_logprobs)
    if not estimator.endswith("+"):
        return values
    with_gradient = kl_k2(logprobs, ref_logprobs)
    return values.detach() + with_gradient - with_gradient.detach()


def topk_divergence(logprobs: Tensor, ref_logprobs: Tensor, beta: float = 0.0) -> Tensor:
    """Return a divergence of p from ref over K tokens of the vocabulary and one event for all others.

    With q and p the K + 1 probabilities of ref and p, it is KL(q || p) for beta 0, KL(p || q) for beta 1, and
    between them the generalised Jensen-Shannon divergence `beta KL(q || m) + (1 - beta) KL(p || m)` with
    `m = beta q + (1 - beta) p`. It is a lower bound of the divergence over the vocabulary, exact if K is all
    of it, and 0 only if all K probabilities agree. It needs no sample of any policy.

    Args:
        logprobs: `[..., K]`, log-probs under p, with gradient.
        ref_logprobs: `[..., K]`, log-probs of the same tokens under ref, such as a teacher's K likeliest.
        beta: from 0 to 1. The Jensen-Shannon divergence goes to 0 at both ends; divided by beta, or by
            1 - beta, it goes to the KL there.

    Returns:
        Nats `[...]`.

    Source: Hinton et al. 2015, "Distilling the knowledge in a neural network", on the K likeliest tokens;
    Agarwal et al. 2023, "On-policy distillation of language models", equation 1, for the divergences.
    """
    p, q = (torch.cat([x, _log_rest(x)[..., None]], -1) for x in (logprobs, ref_logprobs))
    if beta == 0:
        return _kl(q, p)
    if beta == 1:
        return _kl(p, q)
    mixture = torch.logaddexp(q + math.log(beta), p + math.log1p(-beta))
    return beta * _kl(q, mixture) + (1 - beta) * _kl(p, mixture)


def _kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return KL(p || other) of distributions over the last axis."""
    return (logprobs.exp() * (logprobs - other)).sum(-1)


def _log_rest(logprobs: Tensor) -> Tensor:
    """Return the log of the probability that none of the K tokens has; at least that of rounding errors."""
    return torch.log1p(-logprobs.exp().sum(-1).clamp(max=1 - _TINY_REST))


def adapted_kl_weight(weight: float, kl: float, target: float, gain: float) -> float:
    """Return the weight of the KL penalty for the next step, larger if the KL is above its target.

    It is `weight (1 + gain e)` with the proportional error `e = clip((kl - target) / target, -0.2, 0.2)`.

    Args:
        weight: the weight of this step.
        kl: the KL per sequence that this step measured, in nats.
        target: the KL per sequence to keep, in nats, more than 0.
        gain: K of the paper, which uses 0.1. The paper's code uses the number of sequences of the step
            divided by a horizon of 10,000.

    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", section 2.2.
    """
    error = min(max((kl - target) / target, -_MAX_ERROR), _MAX_ERROR)
    return weight * (1 + gain * error)


def adapted_entropy_weight(
    weight: float, entropy: float, target: float, change: float, upper: float
) -> float:
    """Return the weight of the entropy for the next step: larger by `change` if it is at its target or below.

    Args:
        weight: the weight of this step.
        entropy: the mean entropy of a token, in nats.
        target: the entropy to keep.
        change: the change of the weight. Above the target it becomes smaller by as much, and at least 0.
        upper: the largest weight.

    Source: He et al. 2025, "Skywork open reasoner 1 technical report", adaptive entropy control.
    """
    return min(max(weight + (change if entropy <= target else -change), 0.0), upper)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats of softmax(logits): `[..., V]` -> `[...]`, `H = logsumexp(l) - sum p l`."""
    total = torch.logsumexp(logits, dim=-1)
    return total - (torch.softmax(logits, dim=-1) * logits).sum(-1)
