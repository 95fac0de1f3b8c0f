"""Tokens whose update lowers the policy's entropy most: those with a large covariance.

A token that is likely and has a large advantage becomes likelier still, and the entropy falls by about the
covariance of log-probs and advantages over the batch. A few tokens make up most of it.

Source: Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models". All
functions take a whole minibatch. Shapes: T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.types import Sequences


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
    """Return which learned tokens are the share with the largest values, bool `[T]`: KL-Cov's choice.

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
        lower: of the values; a value equal to it is outside.
        upper: of the values; a value equal to it is outside.

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
