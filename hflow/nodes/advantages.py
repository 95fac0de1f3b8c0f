"""From rewards to advantages, on whole batches."""

from __future__ import annotations

from hflow.dsl import compute
from hflow.lazy import algo
from hflow.types import Metrics, PerSequence, PerToken, Sequences, Text


@compute(returns="token_reward")
def kl_reward(
    reward: PerSequence,
    behav_logprobs: PerToken,
    ref_logprobs: PerToken,
    seqs: Sequences,
    *,
    beta: float = 0.05,
) -> tuple[PerToken, Metrics]:
    """The reward at the last token, less `beta` times the KL from the reference at every token.

    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", equation 2.
    """
    kl = algo.kl_k1(behav_logprobs, ref_logprobs)
    return seqs.at_end(reward) - beta * kl, {"kl": kl}


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
) -> tuple[PerToken, PerToken]:
    """Whitened advantages and the critic's targets; V after a cut-off end counts as its future."""
    if bootstrap is not None:
        bootstrap = bootstrap * bootstrap.new_tensor([float(reason == "length") for reason in stop_reason])
    advantages = algo.gae(token_reward, values, seqs, gamma, lam, bootstrap)
    return algo.whiten(advantages, seqs), advantages + values


@compute(returns="advantages", min_group=2)
def group_advantage(reward: PerSequence, seqs: Sequences, *, std: bool = True) -> PerSequence:
    """Each reward relative to its group's mean, over the group's spread if `std` (GRPO)."""
    return algo.group_advantage(reward, seqs, std)
