"""Compute nodes from rewards to advantages, on whole batches."""

from __future__ import annotations

from typing import Literal

from hflow.dsl import compute
from hflow.lazy import algo
from hflow.types import Metrics, PerSequence, PerToken, Sequences, State, Text


@compute(returns="token_reward")
def kl_reward(
    reward: PerSequence,
    behav_logprobs: PerToken,
    ref_logprobs: PerToken,
    seqs: Sequences,
    state: State,
    *,
    beta: float = 0.05,
    estimator: Literal["k1", "k2", "k3"] = "k1",
    target: float | None = None,
    horizon: float = 10_000.0,
) -> tuple[PerToken, Metrics]:
    """Return the reward on the last learned token minus `beta` times the KL to the reference on every token.

    Args:
        reward: `[S]`.
        behav_logprobs: `[T]`.
        ref_logprobs: `[T]`, log-probs under the reference model.
        seqs: the layout of the batch.
        state: remembers the current `beta` if there is a `target`.
        beta: weight of the KL; with a `target`, its initial weight.
        estimator: the estimator of the KL, see `algo.kl_estimate`.
        target: KL per sequence in nats that a controller keeps by changing `beta` after each step. None:
            `beta` is constant.
        horizon: number of sequences in which the controller changes `beta` by 20 % at most.

    Returns:
        Rewards `[T]`, and metrics.

    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", equation 2, and
    section 2.2 for the controller.
    """
    weight = beta if target is None else state.get("beta", beta)
    kl = algo.kl_estimate(behav_logprobs, ref_logprobs, estimator)
    sequence_kl = float(seqs.sum(kl).mean())
    if target is not None:
        state["beta"] = algo.adapted_kl_weight(weight, sequence_kl, target, len(seqs) / horizon)
    return seqs.at_end(reward) - weight * kl, {"kl": kl, "sequence_kl": sequence_kl, "beta": weight}


@compute(returns=("advantages", "value_targets"))
def gae(
    token_reward: PerToken,
    values: PerToken,
    stop_reason: Text,
    seqs: Sequences,
    bootstrap: PerSequence | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: Literal["batch", "group", "none"] = "batch",
) -> tuple[PerToken, PerToken, Metrics]:
    """Return advantages by generalized advantage estimation, and the targets of the critic.

    Args:
        token_reward: `[T]`.
        values: `[T]`, V before each token.
        stop_reason: of each sequence; `length` means that it was cut off.
        seqs: the layout of the batch.
        bootstrap: `[S]`, V after the last token. It is used for sequences that were cut off.
        gamma: discount of rewards.
        lam: lambda of the estimation, from 0 to 1.
        whiten: give advantages mean 0 and variance 1 over the tokens of the batch, of each group, or not at
            all.

    Returns:
        Advantages `[T]`, value targets `[T]`, and metrics.
    """
    if bootstrap is not None:
        bootstrap = bootstrap * bootstrap.new_tensor([float(reason == "length") for reason in stop_reason])
    advantages = algo.gae(token_reward, values, seqs, gamma, lam, bootstrap)
    targets = advantages + values
    if whiten != "none":
        advantages = algo.whiten(advantages, seqs, by_group=whiten == "group")
    return advantages, targets, {"explained_variance": algo.explained_variance(values, targets, seqs)}


@compute(returns="advantages", min_group=2)
def group_advantage(
    reward: PerSequence, seqs: Sequences, *, std: bool = True, eps: float = 1e-4
) -> PerSequence:
    """Return each reward minus its group's mean, over the group's standard deviation if `std` (GRPO).

    Args:
        reward: `[S]`.
        seqs: the layout of the batch.
        std: divide by the group's standard deviation; false is Dr. GRPO.
        eps: added to the standard deviation, so that rewards that differ by less have small advantages.
    """
    return algo.group_advantage(reward, seqs, std, eps)


@compute(returns="advantages", min_group=2)
def leave_one_out(reward: PerSequence, seqs: Sequences) -> PerSequence:
    """Return each reward minus the mean of the other rewards of its group (RLOO)."""
    return algo.leave_one_out(reward, seqs)


@compute(returns="advantages")
def returns_to_go(
    token_reward: PerToken,
    seqs: Sequences,
    *,
    gamma: float = 1.0,
    whiten: Literal["batch", "group", "none"] = "batch",
) -> PerToken:
    """Return the discounted sum of rewards from each token to the end, whitened.

    With the KL in the reward this is REINFORCE++.

    Args:
        token_reward: `[T]`.
        seqs: the layout of the batch.
        gamma: discount of rewards.
        whiten: give advantages mean 0 and variance 1 over the tokens of the batch, of each group, or not at
            all.

    Source: Hu et al. 2025, "REINFORCE++": `A_t = r - beta sum_(i >= t) KL_i`, normalised over the batch.
    """
    no_values = token_reward.new_zeros(token_reward.shape)
    returns = algo.gae(token_reward, no_values, seqs, gamma, lam=1.0)
    return returns if whiten == "none" else algo.whiten(returns, seqs, by_group=whiten == "group")
