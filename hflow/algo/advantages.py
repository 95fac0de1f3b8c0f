"""Advantages: relative to a group, by generalized advantage estimation, and whitening.

Shapes: T packed tokens, S sequences, P groups. PerToken results are 0 where `loss_mask` is 0. Means and
variances are computed in float64, since in float32 the mean of equal large rewards differs from them.
Results have the dtype of the input. Rewards may be integers or booleans; the results are floats then
(`torch.get_default_dtype`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hflow.algo.pass_at_k import pass_at_k
from hflow.types import Sequences

_GAE_BLOCK = 128
"""Number of time steps that `gae` computes with one matrix product."""
_ROUNDING = 1e-9
"""An advantage in float64 that is no larger is 0 but for rounding."""


def group_advantage(
    reward: Tensor,
    seqs: Sequences,
    std: bool = True,
    eps: float = 1e-4,
    *,
    std_over: Literal["group", "batch"] = "group",
) -> Tensor:
    """Return the reward of each sample relative to its group: `A_i = (r_i - mean(r)) / (std(r) + eps)`.

    The standard deviation is unbiased (divided by G - 1), as in the reference implementations of GRPO. In a
    group of one sample, or of equal rewards, advantages are 0.

    Args:
        reward: `[S]`.
        seqs: the layout of the batch, with the group of each sample.
        std: divide by a standard deviation. False is Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-like
            training").
        eps: added to the standard deviation.
        std_over: the rewards whose standard deviation it is: those of the group or of the batch.

    Returns:
        Advantages `[S]`; positive means better than the group's mean.

    Source: DeepSeekMath (Shao et al. 2024), section 4.1.2, outcome supervision; Liu et al. 2025, "Tricks or
    traps? A deep dive into RL for LLM reasoning", for the deviation of the batch.
    """
    count = seqs.group_count()
    exact = reward.double()
    centred = exact - (seqs.group_sum(exact) / count)[seqs.group]
    if std and std_over == "batch":
        centred = centred / (_deviation(exact) + eps)
    elif std:
        centred = centred / (_group_deviation(centred, seqs) + eps)[seqs.group]
    return centred.to(_float_dtype(reward))


def best_advantage(reward: Tensor, seqs: Sequences, std: bool = False, eps: float = 1e-4) -> Tensor:
    """Return the lead of a group's best sample over the second best, and 0 of the others.

    It is leave-one-out for the reward "the best of the group's samples": without the best one, that is the
    second best's; without another, nothing changes.

    Args:
        reward: `[S]`.
        seqs: the layout of the batch.
        std: divide by the standard deviation of the group.
        eps: added to the standard deviation.

    Returns:
        Advantages `[S]`, 0 in groups whose best two are equal, or that have one sample.

    Source: Tang et al. 2025, "Optimizing language models for inference time objectives using reinforcement
    learning", the leave-one-out baseline for the maximum.
    """
    exact = reward.double()
    best = _group_max(exact, seqs)[seqs.group]
    position = torch.arange(len(exact), device=exact.device)
    is_first = position == _group_max(-position.masked_fill(exact < best, len(exact)), seqs).neg()[seqs.group]
    second = _group_max(exact.masked_fill(is_first, -torch.inf), seqs)[seqs.group]
    lead = (exact - second).masked_fill(~is_first | (second == -torch.inf), 0)
    if std:
        mean = (seqs.group_sum(exact) / seqs.group_count())[seqs.group]
        lead = lead / (_group_deviation(exact - mean, seqs) + eps)[seqs.group]
    return lead.to(_float_dtype(reward))


def mean_normalised_advantage(reward: Tensor, seqs: Sequences) -> Tensor:
    """Return each reward minus its group's mean, over the mean: MaxRL, `(r_i - mean(r)) / mean(r)`.

    For rewards of 0 and 1 it is the gradient of the log-likelihood of a right answer in the place of that of
    its probability, so that hard prompts weigh more: of `log p = -sum_k (1 - p)^k / k`, up to the term
    k = G - 1 in groups of G.

    Args:
        reward: `[S]`, 0 or more.
        seqs: the layout of the batch.

    Returns:
        Advantages `[S]`, 0 in groups whose rewards are all 0.

    Source: Tajwar et al. 2026, "Maximum likelihood reinforcement learning" (arXiv 2602.02710), the estimator
    with the control variate.
    """
    exact = reward.double()
    mean = (seqs.group_sum(exact) / seqs.group_count())[seqs.group]
    return ((exact - mean) / mean.masked_fill(mean == 0, 1)).to(_float_dtype(reward))


def moving_baseline_advantage(
    reward: Tensor, keys: Sequence[str], baselines: Mapping[str, float], decay: float
) -> tuple[Tensor, dict[str, float]]:
    """Return rewards minus the moving average of their key's earlier rewards, and the new averages.

    For each sample in the order of the batch, `A = r - b`, and then `b <- decay b + (1 - decay) r`, from 0. A
    baseline that has its own sample's reward would bias the gradient.

    Args:
        reward: `[S]`.
        keys: S keys, such as the role of the sample's player in a game.
        baselines: the average of each key so far.
        decay: from 0 to less than 1.

    Returns:
        Advantages `[S]`, and the average of each key.

    Source: Liu et al. 2025, "SPIRAL: self-play on zero-sum games incentivizes reasoning via multi-agent
    multi-turn reinforcement learning", role-conditioned advantage estimation, in the order of its code.
    """
    averages, advantages = dict(baselines), []
    for key, value in zip(keys, reward.tolist(), strict=True):  # waits: once per batch
        baseline = averages.get(key, 0.0)
        advantages.append(value - baseline)
        averages[key] = decay * baseline + (1 - decay) * value
    return reward.new_tensor(advantages, dtype=_float_dtype(reward)), averages


def optimal_token_advantage(reward: Tensor, gradient: Tensor, seqs: Sequences) -> Tensor:
    """Return rewards minus the baseline of least variance for each position: the optimal token baseline.

    At the t-th learned token, `B_t = sum_i(W_it r_i) / sum_i(W_it)` over the samples of the group that have
    one, with `W_it` the squared norms of the gradient of the log-probs up to t. `A_it = r_i - B_t`, which is
    0 where only one sample has a t-th token.

    Args:
        reward: `[S]`.
        gradient: `[T]`, the squared norm of each token, such as `logit_gradient`.
        seqs: the layout of the batch.

    Returns:
        Advantages `[T]`.

    Source: Li et al. 2026, "The optimal token baseline: variance reduction for long-horizon LLM-RL" (arXiv
    2602.07078).
    """
    row, column, width = _learned_grid(seqs)
    norms = gradient.new_zeros((len(seqs), width), dtype=torch.float64)
    present = torch.zeros_like(norms, dtype=torch.bool).index_put((row, column), torch.ones_like(row).bool())
    norms = norms.index_put((row, column), gradient[seqs.loss_mask].double())
    energy = _discounted_sums(norms.flip(1), 1.0).flip(1).masked_fill(~present, 0)

    def group_sums(x: Tensor) -> Tensor:
        return x.new_zeros(seqs.num_groups, width).index_add(0, seqs.group, x)

    exact = reward.double()[:, None]
    baseline = group_sums(energy * exact) / group_sums(energy).clamp(min=1e-300)
    advantages = (exact - baseline[seqs.group])[row, column]
    return torch.zeros_like(gradient).masked_scatter(seqs.loss_mask, advantages.to(gradient.dtype))


def logit_gradient(logprobs: Tensor, topk_logprobs: Tensor) -> Tensor:
    """Return the squared norm of the gradient of a token's log-prob by the logits, `1 - 2 p + sum_v p_v^2`.

    The sum is over the K likeliest tokens, which leaves out less than the K-th probability times that of all
    tokens behind it.

    Args:
        logprobs: `[T]`, of the tokens.
        topk_logprobs: `[T, K]`, of the likeliest tokens, the likeliest first.

    Returns:
        `[T]`.

    Source: Li et al. 2026, "The optimal token baseline", the logit-gradient proxy.
    """
    return 1 - 2 * logprobs.exp() + (2 * topk_logprobs).exp().sum(-1)


def length_weighted_advantage(reward: Tensor, seqs: Sequences) -> Tensor:
    """Return each reward minus the group's mean weighted by length, `sum(l r) / sum(l)`: OPO.

    It is the baseline of least variance if a sequence's squared gradient is proportional to its length l, the
    number of its learned tokens.

    Args:
        reward: `[S]`.
        seqs: the layout of the batch.

    Returns:
        Advantages `[S]`.

    Source: Hao et al. 2025, "On-policy RL with optimal reward baseline", the length-weighted baseline.
    """
    exact, length = reward.double(), seqs.count().double()
    baseline = seqs.group_sum(length * exact) / seqs.group_sum(length).clamp(min=1)
    return (exact - baseline[seqs.group]).to(_float_dtype(reward))


def rescaled_advantage(reward: Tensor, seqs: Sequences) -> Tensor:
    """Return each reward minus its group's mean, times `S / (number of samples that teach something)`: GPG.

    Groups of equal rewards have no gradient. The factor makes up for them, so that a step's gradient does not
    shrink with their number. If there are only such groups, advantages are 0.

    Args:
        reward: `[S]`.
        seqs: the layout of the batch.

    Returns:
        Advantages `[S]`.

    Source: Chu et al. 2025, "GPG: a simple and strong reinforcement learning baseline for model reasoning",
    with alpha = B / (B - M) for M samples without gradient.
    """
    centred = group_advantage(reward.double(), seqs, std=False)
    teaches = seqs.group_sum(centred.abs())[seqs.group] > 0
    return (centred * len(reward) / teaches.sum().clamp(min=1)).to(_float_dtype(reward))


def decoupled_advantage(
    rewards: Iterable[Tensor], weights: Iterable[float], seqs: Sequences, eps: float = 1e-4
) -> Tensor:
    """Return the weighted sum of one group advantage for each reward, normalised over the batch: GDPO.

    Rewards that are added first lose their differences: (1, 0) and (0, 1) become the same sum.

    Args:
        rewards: K tensors `[S]`.
        weights: K weights.
        seqs: the layout of the batch.
        eps: added to standard deviations.

    Returns:
        Advantages `[S]`, with mean 0 and standard deviation 1.

    Source: Liu et al. 2026, "GDPO: group reward-decoupled normalization policy optimization": the
    normalisation by reward and group, the weighted sum, and the normalisation over the batch.
    """
    pairs = list(zip(rewards, weights, strict=True))
    total = sum((weight * group_advantage(r.double(), seqs, eps=eps) for r, weight in pairs), torch.zeros(()))
    centred = total - total.mean()
    return (centred / (_deviation(total) + eps)).to(_float_dtype(*(reward for reward, _ in pairs)))


def pass_at_k_advantage(correct: Tensor, seqs: Sequences, k: int) -> Tensor:
    """Return advantages for the reward of k answers together: 1 if one of them is right.

    The subsets of k of the group's N samples have these rewards. With n wrong samples, their mean is
    `R = 1 - C(n, k) / C(N, k)`, and the standard deviation `s = sqrt(R (1 - R))`. A right sample has the
    advantage `(1 - R) / s`, a wrong one `(1 - R - C(n - 1, k - 1) / C(N - 1, k - 1)) / s`. If all subsets
    have the same reward, advantages are 0.

    Args:
        correct: bool `[S]`.
        seqs: the layout of the batch.
        k: number of answers, at least 1; 1 is GRPO with the standard deviation of all samples (divided by N).

    Returns:
        Advantages `[S]`.

    Raises:
        ValueError: if a group has fewer than k samples.

    Source: Chen et al. 2025, "Pass@k training for adaptively balancing exploration and exploitation of large
    reasoning models", equations 14 and 15.
    """
    advantages = torch.zeros(len(correct), dtype=torch.float64, device=correct.device)
    counts = torch.stack((seqs.group_count(), seqs.group_sum(correct.long())))
    sizes, right = counts.tolist()  # waits: once per batch
    for group, (size, num_right) in enumerate(zip(sizes, right, strict=True)):
        reward = pass_at_k(size, num_right, k)
        wrong = size - num_right
        deviation = math.sqrt(reward * (1 - reward))
        if not wrong or deviation == 0:
            continue
        stays_wrong = math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)
        of_sample = torch.where(correct, 1 - reward, 1 - reward - stays_wrong).double() / deviation
        advantages = torch.where(seqs.group == group, of_sample, advantages)
    return advantages.float()


def length_scale(seqs: Sequences, power: float) -> Tensor:
    """Return the factor of each sequence's advantage that weighs long sequences less: delta L normalisation.

    `S l^-power / sum(l^-power)` with l the number of learned tokens, over the S sequences that have any; the
    mean over these is 1, and the factor of the others is 0. With power 1 and a loss summed over tokens, it is
    the unbiased estimate of least variance if a sequence's variance grows with its length. Power 0 gives 1.

    Args:
        seqs: the layout of the batch.
        power: alpha of the paper, from 0 to 1.

    Returns:
        Factors `[S]`.

    Source: He et al. 2025, "Delta L normalization: rethink loss aggregation in RLVR".
    """
    length = seqs.count()
    is_learned = length > 0
    weight = length.clamp(min=1).double().pow(-power) * is_learned
    return (weight * is_learned.sum() / weight.sum().clamp(min=1e-300)).float()


def turn_advantage(
    token_reward: Tensor, seqs: Sequences, gamma: float, std: bool, eps: float = 1e-4
) -> Tensor:
    """Return the discounted return of each turn relative to the same turn of the other samples of its group.

    A turn is a run of learned tokens, such as one message of an assistant. Its reward is the sum over its
    tokens and over the tokens up to the next turn (a tool's answer may carry a reward). The return of turn k
    is `R_k = sum_(j >= k) gamma^(j - k) r_j`, and the advantage `R_k - mean(R_k)` over the samples of the
    group that have a k-th turn, divided by their standard deviation. A turn that only one sample has gets 0.

    Args:
        token_reward: `[T]`.
        seqs: the layout of the batch.
        gamma: discount from one turn to the next.
        std: divide by the standard deviation.
        eps: added to the standard deviation.

    Returns:
        Advantages `[T]`.

    Source: Feng et al. 2025, "Group-in-group policy optimization for LLM agent training" (GiGPO): its
    step-level advantage, with the turn's number in the place of the anchor state.
    """
    turns = _turns(token_reward, seqs, gamma)
    number = torch.arange(turns.returns.shape[1], device=seqs.group.device)
    groups = seqs.group[:, None] * len(number) + number
    advantages = _relative(turns.returns[turns.exists], groups[turns.exists], std, eps)
    return turns.widen(advantages, seqs, token_reward)


def hierarchical_advantage(
    token_reward: Tensor,
    input_ids: Tensor,
    seqs: Sequences,
    depth: int,
    power: float,
    gamma: float,
    std: bool,
    eps: float = 1e-4,
) -> Tensor:
    """Return the return of each turn relative to turns of its group that observed the same: HGPO.

    Turns and their returns are those of `turn_advantage`. The observation of a turn is the text before it:
    the prompt, or what a tool or an environment answered to the turn before. For each k from 0 to `depth`,
    turns are compared that have the same observation and the same k observations before it, in any turn of
    the group's samples. With `A_k` the advantage in such a comparison, 0 for a turn alone or with less than k
    observations before its own, and `w_k = (k + 1)^power`, the result is `sum_k w_k A_k / sum_k w_k` over
    those k whose `A_k` is not 0.

    Several methods are called hierarchical GRPO; this is the one of groups within groups.

    Args:
        token_reward: `[T]`.
        input_ids: `[T]`.
        seqs: the layout of the batch.
        depth: largest number of earlier observations, K.
        power: exponent of the weights; 0 is the mean.
        gamma: discount from one turn to the next.
        std: divide by the standard deviation of the compared turns themselves, of n values over n.
        eps: added to the standard deviation.

    Returns:
        Advantages `[T]`.

    Source: He et al. 2026, "Hierarchy-of-groups policy optimization for long-horizon agentic tasks" (arXiv
    2602.22817). The authors' code (verl-agent, `recipe/hgpo/core_hgpo.py`) counts k from 1 in the weights,
    which are `(k + 2)^power` there, and leaves out advantages of 0 as here.
    """
    turns = _turns(token_reward, seqs, gamma)
    returns = turns.returns[turns.exists]
    sums, total = torch.zeros_like(returns), torch.zeros_like(returns)
    for k, groups in enumerate(_contexts(input_ids, seqs, turns, depth)):
        weight, advantages = (k + 1.0) ** power, _relative(returns, groups, std, eps, correction=0)
        sums, total = sums + weight * advantages, total + weight * (advantages.abs() > _ROUNDING)
    return turns.widen(sums / total.masked_fill(total == 0, 1), seqs, token_reward)


@dataclass(frozen=True)
class _Turns:
    """The turns of S sequences, of which the longest has W."""

    number: Tensor
    """int64 `[T]`, the turn of each token, or the one before it; -1 before the first."""
    returns: Tensor
    """`[S, W]`."""
    exists: Tensor
    """bool `[S, W]`."""

    def widen(self, values: Tensor, seqs: Sequences, like: Tensor) -> Tensor:
        """Put a value of each turn that exists on its tokens: `[N]` -> `[T]`, 0 elsewhere."""
        if not len(values):
            return torch.zeros_like(like, dtype=_float_dtype(like))
        by_turn = torch.zeros_like(self.returns)
        by_turn[self.exists] = values
        by_token = by_turn[seqs.index, self.number.clamp(min=0)]
        return by_token.masked_fill(~seqs.loss_mask, 0).to(_float_dtype(like))


def _turns(token_reward: Tensor, seqs: Sequences, gamma: float) -> _Turns:
    """Return the turns of sequences with their discounted returns."""
    learned = seqs.loss_mask
    previous = torch.roll(learned, 1)
    previous[seqs.offsets[:-1][seqs.lengths > 0]] = False
    started = (learned & ~previous).long().cumsum(0)
    first = started.new_zeros(len(seqs)).scatter_reduce(0, seqs.index, started, "amax", include_self=False)
    before = torch.cat([first.new_zeros(1), first[:-1]]) if len(seqs) else first
    number = started - before[seqs.index] - 1
    width = int(number.max()) + 1 if len(number) else 0  # waits: once per batch
    inside = number >= 0
    reward = token_reward.new_zeros(len(seqs), width, dtype=torch.float64)
    reward = reward.index_put(
        (seqs.index[inside], number[inside]), token_reward[inside].double(), accumulate=True
    )
    exists = torch.zeros_like(reward, dtype=torch.bool)
    exists[seqs.index[inside], number[inside]] = True
    return _Turns(number, _discounted_sums(reward, gamma) if width else reward, exists)


def _relative(returns: Tensor, groups: Tensor, std: bool, eps: float, correction: int = 1) -> Tensor:
    """Return returns `[N]` of turns less their group's mean, over its deviation if `std`; 0 for one alone."""
    _, group, count = groups.unique(return_inverse=True, return_counts=True)  # waits: once per batch
    sums = returns.new_zeros(len(count))
    centred: Tensor = returns - (sums.index_add(0, group, returns) / count)[group]
    if std:
        variance = sums.index_add(0, group, centred.square()) / (count - correction).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[group]
    return centred.masked_fill(count[group] == 1, 0)


def _contexts(input_ids: Tensor, seqs: Sequences, turns: _Turns, depth: int) -> list[Tensor]:
    """Return for each k up to `depth` a number for each turn that exists, `[N]`: its group and context."""
    ids, number = input_ids.cpu().numpy(), turns.number.cpu().numpy()  # waits: once per batch
    observed = ~seqs.loss_mask.cpu().numpy()  # waits: once per batch
    counts = turns.exists.sum(1).tolist()  # waits: once per batch
    offsets, owners = seqs.offsets.tolist(), seqs.group.tolist()  # waits: once per batch
    known: dict[tuple[object, ...], int] = {}
    levels: list[list[int]] = [[] for _ in range(depth + 1)]
    for start, end, owner, count in zip(offsets, offsets[1:], owners, counts, strict=False):
        kept = observed[start:end]
        texts, before = ids[start:end][kept], number[start:end][kept]
        bounds = np.searchsorted(before, np.arange(-1, count))
        seen = [texts[a:b].tobytes() for a, b in itertools.pairwise(bounds)]
        for k, level in enumerate(levels):
            for turn in range(count):  # without k observations before its own, a turn is alone
                context = (owner, *seen[turn - k : turn + 1]) if turn >= k else (start, turn, None)
                level.append(known.setdefault(context, len(known)))
    return [torch.tensor(level, device=seqs.group.device) for level in levels]  # waits: once per batch


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
    return (exact - mean).masked_fill(num_others == 0, 0).to(_float_dtype(reward))


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
        Advantages `[T]`, computed in fp32 or more, in the wider dtype of rewards and values. Add `values` to
        get the targets of the critic.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized
    advantage estimation", equations 11, 12 and 16.
    """
    row, column, width = _learned_grid(seqs)
    shape = (len(seqs), width)
    learned = (row, column)
    dtype = _float_dtype(values, token_reward)
    wide = torch.promote_types(dtype, torch.float32)
    reward = token_reward.new_zeros(shape, dtype=wide).index_put(
        learned, token_reward[seqs.loss_mask].to(wide)
    )
    value = values.new_zeros(len(seqs), width + 1, dtype=wide)
    value = value.index_put(learned, values[seqs.loss_mask].to(wide))
    if bootstrap is not None:
        ends = (torch.arange(len(seqs), device=row.device), seqs.count())
        value = value.index_put(ends, bootstrap.to(value.dtype))
    present = torch.zeros(shape, dtype=torch.bool, device=row.device).index_put(
        learned, torch.ones_like(row, dtype=torch.bool)
    )
    delta = (reward + gamma * value[:, 1:] - value[:, :-1]).masked_fill(~present, 0)
    advantages = _discounted_sums(delta, gamma * lam)
    return torch.zeros_like(values, dtype=dtype).masked_scatter(seqs.loss_mask, advantages[learned].to(dtype))


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
    return (
        (centred * torch.rsqrt(variance + eps)[segment]).masked_fill(~seqs.loss_mask, 0).to(_float_dtype(x))
    )


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
    error = learned - values[seqs.loss_mask].double()
    if len(learned) < 2 or not learned.var() > 0:
        return targets.new_zeros((), dtype=_float_dtype(targets))
    return (1 - error.var() / learned.var()).to(_float_dtype(targets))


def _float_dtype(*inputs: Tensor) -> torch.dtype:
    """Return the dtype of a result: the widest of the inputs that are floats, else the default of floats."""
    dtypes = [x.dtype for x in inputs if x.is_floating_point()]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()


def _deviation(x: Tensor) -> Tensor:
    """Return the unbiased standard deviation of all entries; 0 of a single one."""
    return x.std() if len(x) > 1 else x.new_zeros(())


def _group_deviation(centred: Tensor, seqs: Sequences) -> Tensor:
    """Return the unbiased standard deviation `[P]` of each group, from its centred values `[S]`."""
    return (seqs.group_sum(centred.square()) / (seqs.group_count() - 1).clamp(min=1)).sqrt()


def _group_max(x: Tensor, seqs: Sequences) -> Tensor:
    """Return the largest value `[P]` of each group."""
    return x.new_zeros(seqs.num_groups).scatter_reduce(0, seqs.group, x, "amax", include_self=False)


def _learned_grid(seqs: Sequences) -> tuple[Tensor, Tensor, int]:
    """Return the sequence of every learned token, its position among them, and their largest number."""
    row = seqs.index[seqs.loss_mask]
    count = seqs.count()
    starts = count.cumsum(0) - count
    column = torch.arange(len(row), device=row.device) - starts[row]
    return row, column, int(count.max()) if len(seqs) else 0  # waits: once per batch


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
