"""Ratios of probabilities of two policies, bounded so that neither they nor their gradients overflow."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Largest absolute value in nats of the logarithm of a ratio: ratios are within e^-20 and e^20 = 4.9e8.

verl and OpenRLHF use the same bound. A token with a larger one has no gradient through its ratio.
"""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return log-ratios clamped to `MAX_LOG_RATIO`; any shape."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return `exp(logprobs - old_logprobs)`, bounded; any shape."""
    return bounded(logprobs - old_logprobs).exp()


def is_bounded(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return a mask of the ratios that `policy_ratio` bounds, bool of the same shape."""
    return (logprobs - old_logprobs).detach().abs() > MAX_LOG_RATIO
