"""Which samples and tokens of a batch a loss is computed from.

Shapes: T packed tokens, S sequences.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hflow.types import Sequences


def is_observed(seqs: Sequences, trajectory: Tensor | None = None) -> Tensor:
    """Return a mask of the tokens that a policy observed: those that it did not write after its first token.

    These are the tokens of tools and environments, with those of the chat template around them. What is
    before the first learned token of a trajectory is its prompt.

    Args:
        seqs: the layout of the batch.
        trajectory: `[T]`, the trajectory of each token in its sample; None: each sample has one.

    Returns:
        bool `[T]`.
    """
    learned = seqs.loss_mask
    if not len(learned):
        return learned
    owner = seqs.index if trajectory is None else torch.stack([seqs.index, trajectory.long()])
    _, part = torch.unique_consecutive(owner, return_inverse=True, dim=-1)  # waits: once per batch
    position = torch.arange(len(learned), device=learned.device)
    never = len(learned)
    first = position.new_full((never + 1,), never).scatter_reduce(
        0, part, position.masked_fill(~learned, never), "amin"
    )
    return ~learned & (position > first[part])


def is_best_or_worst(reward: Tensor, seqs: Sequences, best: int, worst: int) -> Tensor:
    """Return a mask of the samples with the largest and the smallest rewards of each group: PF-PPO's filter.

    A reward model is more often right about these than about the samples between them. Of equal rewards, the
    first sample counts as better.

    Args:
        reward: `[S]`.
        seqs: the layout of the batch.
        best: number of samples with the largest rewards.
        worst: number of samples with the smallest rewards.

    Returns:
        bool `[S]`.

    Source: Shen and Zhang 2024, "Policy filtration in RLHF to fine-tune LLM for code generation", the
    best-worst filter.
    """
    by_reward = reward.argsort(descending=True, stable=True)
    order = by_reward[seqs.group[by_reward].argsort(stable=True)]
    count = seqs.group_count()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    rank = rank - (count.cumsum(0) - count)[seqs.group]
    return (rank < best) | (rank >= count[seqs.group] - worst)


def resampling_weights(
    reward: Tensor, method: Literal["pow", "max_min", "max_random"] = "pow", power: float = 2.0
) -> Tensor:
    """Return the probability that a sample is drawn, up to a factor.

    Args:
        reward: `[S]`.
        method: `pow`: `|r|^power`; `max_min`: only samples with the largest or the smallest reward of the
            batch; `max_random`: those with the largest reward 4 times as likely as others.
        power: exponent for `pow`.

    Returns:
        Weights `[S]`, each 1e-8 more, so that a batch of rewards 0 can be drawn from.

    Source: verl, `use_pf_ppo`; after Shen and Zhang 2024, "Policy filtration in RLHF to fine-tune LLM for
    code generation".
    """
    exact = reward.double()
    if method == "pow":
        weights = exact.abs() ** power
    elif method == "max_min":
        weights = ((exact == exact.max()) | (exact == exact.min())).double()
    else:
        weights = torch.where(exact == exact.max(), 0.4, 0.1).double()
    return weights + 1e-8


def resampled(weights: Tensor) -> Tensor:
    """Draw S of S samples with replacement, by weights `[S]`; return how often each was drawn, int64 `[S]`.

    It draws from torch's generator of the device.
    """
    drawn = torch.multinomial(weights, len(weights), replacement=True)
    return torch.bincount(drawn, minlength=len(weights))
