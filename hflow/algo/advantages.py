"""Advantages: relative to a group, by generalised estimation, whitened.

Shapes: T packed tokens, S sequences, P groups. PerToken results are 0 where `loss_mask` is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.types import Sequences

_GAE_BLOCK = 128
"""Time steps that `gae` folds into one matrix product."""


def group_advantage(reward: Tensor, seqs: Sequences, std: bool = True, eps: float = 1e-4) -> Tensor:
    """Reward of each sample relative to its group: `A_i = (r_i - mean(r)) / (std(r) + eps)`.

    The standard deviation is the unbiased one (divided by G - 1), as in the reference
    implementations of GRPO; `std=False` leaves it out (Dr. GRPO, Liu et al. 2025). A group of
    one sample, or of equal rewards, has advantage 0.

    Args:
        reward: `[S]`.
        seqs: whose `group` says which samples belong together.
        std: whether to divide by the group's standard deviation.
        eps: added to the standard deviation.

    Returns:
        `[S]`; positive means better than the group.

    Source: DeepSeekMath (Shao et al. 2024), section 4.1.2, outcome supervision.
    """
    count = seqs.group_count().to(reward.dtype)
    centred = reward - (seqs.group_sum(reward) / count)[seqs.group]
    if not std:
        return centred
    variance = seqs.group_sum(centred.square()) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt() + eps)[seqs.group]


def leave_one_out(reward: Tensor, seqs: Sequences) -> Tensor:
    """Reward of each sample less the mean of the others of its group: RLOO.

    `A_i = r_i - sum_(j != i) r_j / (G - 1)`, which is `G / (G - 1)` times `r_i - mean(r)`. A sample
    alone in its group has advantage 0.

    Args:
        reward: `[S]`.
        seqs: whose `group` says which samples belong together.

    Returns:
        `[S]`.

    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; Ahmadian et al.
    2024, "Back to basics", the RLOO estimator.
    """
    others = (seqs.group_count() - 1).to(reward.dtype)
    mean = (seqs.group_sum(reward)[seqs.group] - reward) / others.clamp(min=1)[seqs.group]
    return (reward - mean).masked_fill(others[seqs.group] == 0, 0)


def gae(
    token_reward: Tensor,
    values: Tensor,
    seqs: Sequences,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimation over each sequence's learned tokens.

    `delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = sum_k (gamma lam)^k delta_{t+k}`, where t + 1 is
    the next **learned** token (tool outputs between two turns are stepped over) and the value
    after the last one is `bootstrap`.

    Args:
        token_reward: `[T]`.
        values: `[T]`, V before each token.
        seqs: lengths and learned tokens.
        gamma: discount of rewards.
        lam: 0 is one-step temporal difference, 1 is the discounted return minus V.
        bootstrap: `[S]`, V after the last token of each sequence; None means 0.

    Returns:
        Advantages `[T]`; add `values` to get the returns that a critic is trained on.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized
    advantage estimation", equations 11, 12 and 16.
    """
    row, column, width = _learned_grid(seqs)
    shape = (len(seqs), width)
    learned = (row, column)
    reward = token_reward.new_zeros(shape).index_put(learned, token_reward[seqs.loss_mask])
    value = values.new_zeros(len(seqs), width + 1).index_put(learned, values[seqs.loss_mask])
    if bootstrap is not None:
        ends = (torch.arange(len(seqs), device=row.device), seqs.count())
        value = value.index_put(ends, bootstrap.to(value.dtype))
    present = torch.zeros(shape, dtype=torch.bool, device=row.device).index_put(
        learned, torch.ones_like(row, dtype=torch.bool)
    )
    delta = (reward + gamma * value[:, 1:] - value[:, :-1]).masked_fill(~present, 0)
    advantages = _discounted_sums(delta, gamma * lam)
    return torch.zeros_like(values).masked_scatter(seqs.loss_mask, advantages[learned])


def whiten(x: Tensor, seqs: Sequences, eps: float = 1e-8, by_group: bool = False) -> Tensor:
    """Shift and scale a PerToken to mean 0 and variance 1 over the learned tokens.

    `(x - mean) / sqrt(var + eps)` with the unbiased variance; 0 where `loss_mask` is 0.

    Args:
        x: `[T]`.
        seqs: learned tokens and groups.
        eps: added to the variance.
        by_group: whether each group has a mean and a variance of its own, instead of the batch.
    """
    part = seqs.group[seqs.index] if by_group else torch.zeros_like(seqs.index)
    num_parts = seqs.num_groups if by_group else 1

    def sums(values: Tensor) -> Tensor:
        learned = values.masked_fill(~seqs.loss_mask, 0)
        return learned.new_zeros(num_parts).index_add(0, part, learned)

    count = sums(torch.ones_like(x))
    centred = x - (sums(x) / count.clamp(min=1))[part]
    variance = sums(centred.square()) / (count - 1).clamp(min=1)
    return (centred * torch.rsqrt(variance + eps)[part]).masked_fill(~seqs.loss_mask, 0)


def explained_variance(values: Tensor, targets: Tensor, seqs: Sequences) -> Tensor:
    """How much of the returns a critic foretells: `1 - var(R - V) / var(R)` over the learned tokens.

    1 is a perfect critic, 0 one that knows nothing but a constant; 0 too where all returns are equal.
    """
    learned = targets[seqs.loss_mask]
    missed = learned - values[seqs.loss_mask]
    if len(learned) < 2 or not learned.var() > 0:
        return learned.new_zeros(())
    return 1 - missed.var() / learned.var()


def _learned_grid(seqs: Sequences) -> tuple[Tensor, Tensor, int]:
    """Row (sequence) and column (rank within it) of every learned token, and the grid's width."""
    row = seqs.index[seqs.loss_mask]
    count = seqs.count()
    starts = count.cumsum(0) - count
    column = torch.arange(len(row), device=row.device) - starts[row]
    return row, column, int(count.max()) if len(seqs) else 0


def _discounted_sums(delta: Tensor, discount: float) -> Tensor:
    """`out[:, t] = sum over k >= t of discount^(k-t) delta[:, k]`, block by block from the end."""
    width = min(_GAE_BLOCK, delta.shape[1])
    steps = torch.arange(width, device=delta.device)
    gap = (steps[:, None] - steps[None, :]).to(delta.dtype)
    kernel = torch.where(gap >= 0, discount ** gap.clamp(min=0), 0.0)
    reach = discount ** (width - steps).to(delta.dtype)
    out = torch.empty_like(delta)
    carry = delta.new_zeros(len(delta))
    for end in range(delta.shape[1], 0, -_GAE_BLOCK):
        start = max(end - _GAE_BLOCK, 0)
        size = end - start
        block = delta[:, start:end] @ kernel[:size, :size] + carry[:, None] * reach[width - size :]
        out[:, start:end] = block
        carry = block[:, 0]
    return out
