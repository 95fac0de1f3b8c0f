"""Advantages: relative to a group, by generalized advantage estimation, and whitening.

Shapes: T packed tokens, S sequences, P groups. PerToken results are 0 where `loss_mask` is 0. Means and
variances are computed in float64, since in float32 the mean of equal large rewards differs from them.
Results have the dtype of the input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.types import Sequences

_GAE_BLOCK = 128
"""Number of time steps that `gae` computes with one matrix product."""


def group_advantage(reward: Tensor, seqs: Sequences, std: bool = True, eps: float = 1e-4) -> Tensor:
    """Return the reward of each sample relative to its group: `A_i = (r_i - mean(r)) / (std(r) + eps)`.

    The standard deviation is unbiased (divided by G - 1), as in the reference implementations of GRPO. In a
    group of one sample, or of equal rewards, advantages are 0.

    Args:
        reward: `[S]`.
        seqs: the layout of the batch, with the group of each sample.
        std: divide by the standard deviation of the group. False is Dr. GRPO (Liu et al. 2025).
        eps: added to the standard deviation.

    Returns:
        Advantages `[S]`; positive means better than the group's mean.

    Source: DeepSeekMath (Shao et al. 2024), section 4.1.2, outcome supervision.
    """
    count = seqs.group_count()
    exact = reward.double()
    centred = exact - (seqs.group_sum(exact) / count)[seqs.group]
    if std:
        variance = seqs.group_sum(centred.square()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[seqs.group]
    return centred.to(reward.dtype)


def leave_one_out(reward: Tensor, seqs: Sequences) -> Tensor:
    """Return the reward of each sample minus the mean of the other samples of its group: RLOO.

    `A_i = r_i - sum_(j != i) r_j / (G - 1)`, which is `G / (G - 1)` times `r_i - mean(r)`. In a group of one
    sample the advantage is 0.

    Args:
        reward: `[S]`.
        seqs: the layout of the batch, with the group of each sample.

    Returns:
        Advantages `[S]`.

    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; Ahmadian et al.
    2024, "Back to basics", the RLOO estimator.
    """
    num_others = (seqs.group_count() - 1)[seqs.group]
    exact = reward.double()
    mean = (seqs.group_sum(exact)[seqs.group] - exact) / num_others.clamp(min=1)
    return (exact - mean).masked_fill(num_others == 0, 0).to(reward.dtype)


def gae(
    token_reward: Tensor,
    values: Tensor,
    seqs: Sequences,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """Return advantages by generalized advantage estimation over the learned tokens of each sequence.

    `delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = sum_k (gamma lam)^k delta_{t+k}`, where t + 1 is
    the next learned token (tokens of tools and templates are skipped), and the value after the last learned
    token is `bootstrap`.

    Args:
        token_reward: `[T]`.
        values: `[T]`, V before each token.
        seqs: the layout of the batch, with its learned tokens.
        gamma: discount of rewards.
        lam: lambda, from 0 (one-step temporal difference) to 1 (discounted return minus V).
        bootstrap: `[S]`, V after the last token of each sequence. None: 0.

    Returns:
        Advantages `[T]`. Add `values` to get the targets of the critic.

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
    """Shift and scale values per token to mean 0 and variance 1 over the learned tokens.

    `(x - mean) / sqrt(var + eps)` with the unbiased variance.

    Args:
        x: `[T]`.
        seqs: the layout of the batch, with its learned tokens and groups.
        eps: added to the variance.
        by_group: use the mean and variance of each group, instead of those of the batch.

    Returns:
        `[T]`, 0 where `loss_mask` is 0.
    """
    segment = seqs.group[seqs.index] if by_group else torch.zeros_like(seqs.index)
    num_segments = seqs.num_groups if by_group else 1

    def sums(values: Tensor) -> Tensor:
        learned = values.masked_fill(~seqs.loss_mask, 0)
        return learned.new_zeros(num_segments).index_add(0, segment, learned)

    exact = x.double()
    count = sums(torch.ones_like(exact))
    centred = exact - (sums(exact) / count.clamp(min=1))[segment]
    variance = sums(centred.square()) / (count - 1).clamp(min=1)
    return (centred * torch.rsqrt(variance + eps)[segment]).masked_fill(~seqs.loss_mask, 0).to(x.dtype)


def explained_variance(values: Tensor, targets: Tensor, seqs: Sequences) -> Tensor:
    """Return the part of the variance of returns that a critic predicts: `1 - var(R - V) / var(R)`.

    1 means a perfect critic, 0 a constant one. If all returns are equal, the result is 0.

    Args:
        values: `[T]`, V.
        targets: `[T]`, the returns R.
        seqs: the layout of the batch, with its learned tokens.

    Returns:
        A scalar tensor.
    """
    learned = targets[seqs.loss_mask].double()
    error = learned - values[seqs.loss_mask]
    if len(learned) < 2 or not learned.var() > 0:
        return targets.new_zeros(())
    return (1 - error.var() / learned.var()).to(targets.dtype)


def _learned_grid(seqs: Sequences) -> tuple[Tensor, Tensor, int]:
    """Return the sequence of every learned token, its position among them, and their largest number."""
    row = seqs.index[seqs.loss_mask]
    count = seqs.count()
    starts = count.cumsum(0) - count
    column = torch.arange(len(row), device=row.device) - starts[row]
    return row, column, int(count.max()) if len(seqs) else 0


def _discounted_sums(delta: Tensor, discount: float) -> Tensor:
    """Return `out[:, t] = sum over k >= t of discount^(k-t) delta[:, k]`, block by block from the end."""
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
