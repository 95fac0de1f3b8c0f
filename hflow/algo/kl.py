"""Estimators of KL divergence from samples, and entropy.

`kl_*(logprobs, ref_logprobs)` estimate KL(p || ref) from tokens that were drawn from p, given both
log-probs of each token; any shape, elementwise. With `r = ref(x) / p(x)` they are the k1, k2 and
k3 of John Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits): `[..., V]` -> `[...]`, `H = logsumexp(l) - sum p l`."""
    total = torch.logsumexp(logits, dim=-1)
    return total - (torch.softmax(logits, dim=-1) * logits).sum(-1)
