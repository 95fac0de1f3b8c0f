"""Compute nodes from rewards to advantages, and a weight of the loss, on whole batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from hflow.base.errors import RunError
from hflow.dsl import checked_by, compute
from hflow.dsl.lazy import algo
from hflow.types import Metrics, PerSequence, PerToken, Sequences, State, Text


def _unit_problem(knobs: Mapping[str, Any], *names: str) -> str | None:
    """Return the problem of a knob that is not from 0 to 1, with the fix."""
    wrong = next((name for name in names if not 0 <= knobs[name] <= 1), None)
    return None if wrong is None else f"{wrong} is {knobs[wrong]}; it must be from 0 to 1"


_HORIZON, _EPS, _LAM = 10_000.0, 1e-4, 0.95
"""Defaults of `horizon`, `eps` and `lam`."""


def _check_kl_reward(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if knobs["beta"] < 0:
        return f"beta is {knobs['beta']}; it must be 0 or more"
    if knobs["target"] is None:
        return "horizon has no effect without a target. Set target" if knobs["horizon"] != _HORIZON else None
    for name in ("target", "horizon"):
        if knobs[name] <= 0:
            return f"{name} is {knobs[name]}; it must be more than 0"
    return None if knobs["beta"] > 0 else "beta=0 stays 0, so that target has no effect. Set beta above 0"


@compute(returns="token_reward")
@checked_by(_check_kl_reward)
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
    horizon: float = _HORIZON,
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
    return seqs.at_end(reward.to(kl.dtype)) - weight * kl, {
        "kl": kl,
        "sequence_kl": sequence_kl,
        "beta": weight,
    }


def _check_adaptive_entropy(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    for name in ("target", "change", "upper"):
        if knobs[name] <= 0:
            return f"{name} is {knobs[name]}; it must be more than 0"
    if not 0 <= knobs["initial"] <= knobs["upper"]:
        return f"initial is {knobs['initial']} and upper is {knobs['upper']}; it must be between 0 and upper"
    return None


@compute(returns="entropy_weights")
@checked_by(_check_adaptive_entropy)
def adaptive_entropy(
    prox_entropy: PerToken,
    seqs: Sequences,
    state: State,
    *,
    target: float = 0.2,
    change: float = 0.005,
    initial: float = 0.0,
    upper: float = 1.0,
) -> tuple[PerToken, Metrics]:
    """Return the weight of the entropy in the loss, which keeps the entropy from falling below a target.

    The weight follows `algo.adapted_entropy_weight`, and counts in steps whose entropy is at the target or
    below. Losses of tokens read it in the place of `entropy_coef`.

    Args:
        prox_entropy: `[T]`, from `entropy_inf`.
        seqs: the layout of the batch.
        state: remembers the weight.
        target: mean entropy of a token in nats.
        change: change of the weight after each step.
        initial: weight of the first step.
        upper: largest weight.

    Returns:
        Weights `[T]`, all the same, and metrics.
    """
    weight = state.get("weight", initial)
    entropy = float(prox_entropy[seqs.loss_mask].mean())
    state["weight"] = algo.adapted_entropy_weight(weight, entropy, target, change, upper)
    applied = weight if entropy <= target else 0.0
    return prox_entropy.new_full(prox_entropy.shape, applied), {"entropy": entropy, "weight": applied}


def _check_gae(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if knobs["gamma"] == 0 and knobs["lam"] != _LAM:
        return "lam has no effect with gamma=0. Remove one of them"
    return _unit_problem(knobs, "gamma", "lam")


@compute(returns=("advantages", "value_targets"))
@checked_by(_check_gae)
def gae(
    token_reward: PerToken,
    values: PerToken,
    stop_reason: Text,
    seqs: Sequences,
    bootstrap: PerSequence | None = None,
    *,
    gamma: float = 1.0,
    lam: float = _LAM,
    whiten: Literal["batch", "group", "none"] = "batch",
) -> tuple[PerToken, PerToken, Metrics]:
    """Return advantages by generalized advantage estimation, and the targets of the critic.

    Args:
        token_reward: `[T]`.
        values: `[T]`, V before each token.
        stop_reason: the stop reason of each sequence; `length` means that it was cut off.
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


def _refuse_single_samples(seqs: Sequences) -> None:
    """Refuse a batch of groups of one, which `min_group=1` lets through: all advantages would be 0."""
    if len(seqs) and seqs.num_groups == len(seqs):
        raise RunError(
            "each prompt of the batch has one sample, so that a comparison with the others of its group "
            "teaches nothing. Set group= of the generate node to 2 or more"
        )


def _check_std(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if knobs["eps"] <= 0:
        return f"eps is {knobs['eps']}; it must be more than 0"
    if not knobs["std"] and knobs["eps"] != _EPS:
        return "eps has no effect with std=false. Remove one of them"
    return None


def _check_group_advantage(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if problem := _check_std(knobs, reads):
        return problem
    if not knobs["std"] and knobs["std_over"] != "group":
        return "std_over has no effect with std=false. Remove one of them"
    if not 0 <= knobs["length_power"] <= 1:
        return f"length_power is {knobs['length_power']}; it must be from 0 to 1"
    return None


@compute(returns="advantages", min_group=2)
@checked_by(_check_group_advantage)
def group_advantage(
    reward: PerSequence,
    seqs: Sequences,
    *,
    std: bool = True,
    std_over: Literal["group", "batch"] = "group",
    eps: float = _EPS,
    length_power: float = 0.0,
) -> PerSequence:
    """Return each reward minus its group's mean, over the standard deviation if `std` (GRPO).

    Args:
        reward: `[S]`.
        seqs: the layout of the batch.
        std: divide by a standard deviation; false is Dr. GRPO.
        std_over: the rewards whose standard deviation it is.
        eps: added to the standard deviation, so that rewards that differ by less have small advantages.
        length_power: weigh a sequence of l learned tokens by `l^-length_power` (`algo.length_scale`), for
            `reduce=seq-mean-token-sum`.
    """
    _refuse_single_samples(seqs)
    advantages = algo.group_advantage(reward, seqs, std, eps, std_over=std_over)
    return advantages * algo.length_scale(seqs, length_power) if length_power else advantages


@compute(returns="advantages", min_group=2)
def opo_advantage(reward: PerSequence, seqs: Sequences) -> PerSequence:
    """Return each reward minus its group's length-weighted mean (OPO, `algo.length_weighted_advantage`)."""
    _refuse_single_samples(seqs)
    return algo.length_weighted_advantage(reward, seqs)


@compute(returns="advantages", min_group=2)
def gpg_advantage(reward: PerSequence, seqs: Sequences) -> PerSequence:
    """Return each reward minus its group's mean, rescaled for equal ones (GPG, `algo.rescaled_advantage`)."""
    _refuse_single_samples(seqs)
    return algo.rescaled_advantage(reward, seqs)


@compute(returns="advantages", min_group=2)
@checked_by(_check_std)
def best_advantage(
    reward: PerSequence, seqs: Sequences, *, std: bool = False, eps: float = _EPS
) -> PerSequence:
    """Return the lead of a group's best sample over the second best, 0 elsewhere (`algo.best_advantage`).

    Args:
        reward: `[S]`.
        seqs: the layout of the batch.
        std: divide by the standard deviation of the group.
        eps: added to the standard deviation.
    """
    _refuse_single_samples(seqs)
    return algo.best_advantage(reward, seqs, std, eps)


@compute(returns="advantages", min_group=2)
def maxrl_advantage(reward: PerSequence, seqs: Sequences) -> PerSequence:
    """Return each reward minus its group's mean, over the mean (MaxRL, `algo.mean_normalised_advantage`).

    Raises:
        RunError: if a reward is negative.
    """
    _refuse_single_samples(seqs)
    if bool((reward < 0).any()):
        raise RunError(
            "maxrl_advantage divides by the mean reward: rewards must be 0 or more, such as 0 and 1"
        )
    return algo.mean_normalised_advantage(reward, seqs)


@compute(returns="advantages", min_group=2)
def optimal_token_advantage(reward: PerSequence, logit_gradient: PerToken, seqs: Sequences) -> PerToken:
    """Return rewards minus the optimal token baseline (`algo.optimal_token_advantage`).

    Args:
        reward: `[S]`.
        logit_gradient: `[T]`, from `logit_gradient_inf`.
        seqs: the layout of the batch.
    """
    _refuse_single_samples(seqs)
    return algo.optimal_token_advantage(reward, logit_gradient, seqs)


def _check_role(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    decay = knobs["decay"]
    return None if 0 <= decay < 1 else f"decay is {decay}; it must be from 0 to less than 1"


@compute(returns="advantages")
@checked_by(_check_role)
def role_advantage(
    reward: PerSequence, role: Text, state: State, *, decay: float = 0.95
) -> tuple[PerSequence, Metrics]:
    """Return each reward minus the moving average of its role's rewards (`algo.moving_baseline_advantage`).

    Args:
        reward: `[S]`.
        role: the role of each sample, such as the name of a game and its player's place.
        state: remembers the average of each role.
        decay: how much of the average is kept at each sample.

    Returns:
        Advantages `[S]`, and metrics: `baseline`, the mean over roles.
    """
    advantages, averages = algo.moving_baseline_advantage(reward, role, state, decay)
    state.update(averages)
    return advantages, {"baseline": sum(averages.values()) / max(len(averages), 1)}


@compute(returns="advantages", min_group=2)
def reinforce_pp_baseline(reward: PerSequence, seqs: Sequences) -> PerToken:
    """Return each reward minus its group's mean, whitened over the batch's tokens (REINFORCE++ baseline).

    Source: Hu et al. 2025, "REINFORCE++", the variant with a baseline, which groups of all-equal rewards
    cannot blow up. Its KL, if any, is in the loss (`kl_coef` with k2).
    """
    _refuse_single_samples(seqs)
    return algo.whiten(seqs.widen(algo.group_advantage(reward, seqs, std=False)), seqs)


def _check_gdpo(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    num_rewards = len({"reward", "second_reward", "third_reward"} & set(reads))
    if len(knobs["weights"]) not in (0, num_rewards):
        return f"weights has {len(knobs['weights'])} number(s) for {num_rewards} rewards. Give one for each"
    return None


@compute(returns="advantages", min_group=2)
@checked_by(_check_gdpo)
def gdpo_advantage(
    reward: PerSequence,
    second_reward: PerSequence,
    seqs: Sequences,
    third_reward: PerSequence | None = None,
    *,
    weights: tuple[float, ...] = (),
) -> PerSequence:
    """Return advantages of several rewards, each normalised by itself (GDPO, `algo.decoupled_advantage`).

    `use(nodes.gdpo_advantage, reads={"reward": "right", "second_reward": "format"})` names the rewards.

    Args:
        reward: `[S]`.
        second_reward: `[S]`.
        seqs: the layout of the batch.
        third_reward: `[S]`, if there is one.
        weights: one for each reward. Default: 1 each.
    """
    _refuse_single_samples(seqs)
    rewards = [r for r in (reward, second_reward, third_reward) if r is not None]
    return algo.decoupled_advantage(rewards, weights or (1.0,) * len(rewards), seqs)


def _check_pass_at_k(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    return f"k is {knobs['k']}; it must be at least 1" if knobs["k"] < 1 else None


@compute(returns="advantages", min_group=2)
@checked_by(_check_pass_at_k)
def pass_at_k_advantage(
    reward: PerSequence, seqs: Sequences, *, k: int = 4, right: float = 0.5
) -> PerSequence:
    """Return advantages for the reward "one of k answers is right" (`algo.pass_at_k_advantage`).

    Args:
        reward: `[S]`.
        seqs: the layout of the batch.
        k: number of answers; at most the number of samples of a prompt.
        right: an answer is right if its reward is larger.

    Raises:
        RunError: if a prompt has fewer than k samples.
    """
    smallest = int(seqs.group_count().min()) if len(seqs) else k
    if smallest < k:
        raise RunError(f"pass_at_k_advantage: a prompt has {smallest} samples, fewer than k={k}. Lower k")
    return algo.pass_at_k_advantage(reward > right, seqs, k)


def _check_turn_advantage(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    return _check_std(knobs, reads) or _unit_problem(knobs, "gamma")


@compute(returns="advantages", min_group=2)
@checked_by(_check_turn_advantage)
def turn_advantage(
    token_reward: PerToken, seqs: Sequences, *, gamma: float = 0.95, std: bool = True, eps: float = _EPS
) -> PerToken:
    """Return advantages of turns, for episodes whose turns have rewards of their own (`algo.turn_advantage`).

    Args:
        token_reward: `[T]`, such as the reward of each turn on its last token.
        seqs: the layout of the batch.
        gamma: discount from one turn to the next.
        std: divide by the standard deviation over the samples of the group.
        eps: added to the standard deviation.
    """
    _refuse_single_samples(seqs)
    return algo.turn_advantage(token_reward, seqs, gamma, std, eps)


def _check_hierarchical(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if knobs["depth"] < 1:
        return f"depth is {knobs['depth']}; it must be 1 or more"
    if knobs["power"] < 0:
        return f"power is {knobs['power']}; it must be 0 or more"
    return _check_turn_advantage(knobs, reads)


@compute(returns="advantages", min_group=2)
@checked_by(_check_hierarchical)
def hierarchical_advantage(
    token_reward: PerToken,
    input_ids: PerToken,
    seqs: Sequences,
    *,
    depth: int = 2,
    power: float = 1.0,
    gamma: float = 0.95,
    std: bool = True,
    eps: float = _EPS,
) -> PerToken:
    """Return advantages of turns among those that observed the same (`algo.hierarchical_advantage`).

    Args:
        token_reward: `[T]`, such as the reward of each turn on its last token.
        input_ids: `[T]`.
        seqs: the layout of the batch.
        depth: largest number of earlier observations that the turns of a group share.
        power: weight of groups that share k earlier observations, `(k + 1)^power`.
        gamma: discount from one turn to the next.
        std: divide by the standard deviation of each group.
        eps: added to the standard deviation.
    """
    _refuse_single_samples(seqs)
    return algo.hierarchical_advantage(token_reward, input_ids, seqs, depth, power, gamma, std, eps)


@compute(returns="advantages", min_group=2)
def leave_one_out(reward: PerSequence, seqs: Sequences) -> PerSequence:
    """Return each reward minus the mean of the other rewards of its group (RLOO)."""
    _refuse_single_samples(seqs)
    return algo.leave_one_out(reward, seqs)


def _check_returns_to_go(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    return _unit_problem(knobs, "gamma")


@compute(returns="advantages")
@checked_by(_check_returns_to_go)
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
