"""Estimators of KL divergence from samples, the controller of its weight, and entropy.

`kl_*(logprobs, ref_logprobs)` estimate KL(p || ref) from tokens that were drawn from p, given both
log-probs of each token; any shape, elementwise. With `r = ref(x) / p(x)` they are the k1, k2 and
k3 of John Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_ERROR = 0.2


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`-log r`: unbiased, high variance, may be negative."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`(log r)^2 / 2`: biased, low variance, never negative; its gradient is that of KL(p || ref)."""
    return (logprobs - ref_logprobs).square() / 2


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`(r - 1) - log r`: unbiased, low variance, never negative."""
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """The estimator of that name: `k1`, `k2` or `k3`."""
    return {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}[estimator](logprobs, ref_logprobs)


def adapted_kl_weight(weight: float, kl: float, target: float, gain: float) -> float:
    """The weight of the KL penalty in the next step: it grows where KL is above its target.

    `weight (1 + gain e)` with the proportional error `e = clip((kl - target) / target, -0.2, 0.2)`.

    Args:
        weight: of this step.
        kl: measured in this step: per sequence, in nats.
        target: the KL to hold, above 0.
        gain: K of the paper, 0.1 there; its code takes the step's sequences over a horizon of 10,000.

    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", section 2.2.
    """
    error = min(max((kl - target) / target, -_MOST_ERROR), _MOST_ERROR)
    return weight * (1 + gain * error)


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits): `[..., V]` -> `[...]`, `H = logsumexp(l) - sum p l`."""
    total = torch.logsumexp(logits, dim=-1)
    return total - (torch.softmax(logits, dim=-1) * logits).sum(-1)
