"""From rewards to advantages, on whole batches."""

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
    """The reward at the last token, less `beta` times the KL from the reference at every token.

    Without a `target`, `beta` is fixed. With one (nats a sequence) it is where a controller starts that
    holds the KL there: it moves `beta` after each step, by at most 20 % in `horizon` sequences.

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
    """Advantages and the critic's targets; V after a cut-off end counts as its future.

    Advantages are whitened over the batch's tokens, over each group's, or left as they are.
    """
    if bootstrap is not None:
        bootstrap = bootstrap * bootstrap.new_tensor([float(reason == "length") for reason in stop_reason])
    advantages = algo.gae(token_reward, values, seqs, gamma, lam, bootstrap)
    targets = advantages + values
    if whiten != "none":
        advantages = algo.whiten(advantages, seqs, by_group=whiten == "group")
    return advantages, targets, {"explained_variance": algo.explained_variance(values, targets, seqs)}


@compute(returns="advantages", min_group=2)
def group_advantage(reward: PerSequence, seqs: Sequences, *, std: bool = True) -> PerSequence:
    """Each reward relative to its group's mean, over the group's spread if `std` (GRPO)."""
    return algo.group_advantage(reward, seqs, std)


@compute(returns="advantages", min_group=2)
def leave_one_out(reward: PerSequence, seqs: Sequences) -> PerSequence:
    """Each reward relative to the mean of the others of its group (RLOO)."""
    return algo.leave_one_out(reward, seqs)


@compute(returns="advantages")
def returns_to_go(
    token_reward: PerToken,
    seqs: Sequences,
    *,
    gamma: float = 1.0,
    whiten: Literal["batch", "group", "none"] = "batch",
) -> PerToken:
    """What is still to come at each token, whitened: REINFORCE++ where the reward holds the KL.

    Source: Hu et al. 2025, "REINFORCE++": `A_t = r - beta sum_(i >= t) KL_i`, normalised over the batch.
    """
    no_values = token_reward.new_zeros(token_reward.shape)
    returns = algo.gae(token_reward, no_values, seqs, gamma, lam=1.0)
    return returns if whiten == "none" else algo.whiten(returns, seqs, by_group=whiten == "group")
