"""Compute nodes that choose the samples (`mask=`) and observations (`observed=`) that a train node learns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from hflow.base.errors import RunError
from hflow.dsl import checked_by, compute
from hflow.dsl.lazy import algo
from hflow.types import Metrics, PerSequence, PerToken, Sequences


@compute(returns="is_observed")
def observed_tokens(seqs: Sequences, trajectory: PerToken | None = None) -> PerToken:
    """Return a mask of what tools and environments wrote; `observed="is_observed"` uses it.

    See `algo.is_observed`.

    Args:
        seqs: the layout of the batch.
        trajectory: `[T]`, of episodes that return a list: the trajectory of each token.
    """
    return algo.is_observed(seqs, trajectory)


def _check_best_worst(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    best, worst = knobs["best"], knobs["worst"]
    if min(best, worst) < 0 or best + worst < 1:
        return f"best is {best} and worst is {worst}; they must be 0 or more, and one of them more than 0"
    return None


@compute(returns="is_kept", min_group=2)
@checked_by(_check_best_worst)
def best_worst_mask(reward: PerSequence, seqs: Sequences, *, best: int = 1, worst: int = 1) -> PerSequence:
    """Return a mask of a group's best and worst samples (`algo.is_best_or_worst`); `mask="is_kept"` uses it.

    Args:
        reward: `[S]`.
        seqs: the layout of the batch.
        best: number of samples with the largest rewards.
        worst: number of samples with the smallest rewards.

    Raises:
        RunError: if all samples of each group are kept.
    """
    if len(seqs) and int(seqs.group_count().max()) <= best + worst:
        raise RunError(
            f"best_worst_mask keeps all samples of each prompt, as none has more than best + worst = "
            f"{best + worst}. Set group= of the generate node higher, or remove best_worst_mask"
        )
    return algo.is_best_or_worst(reward, seqs, best, worst)


def _check_resample(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if knobs["power"] <= 0:
        return f"power is {knobs['power']}; it must be more than 0"
    if knobs["weights"] != "pow" and knobs["power"] != 2.0:
        return f"power has no effect with weights={knobs['weights']}. Remove one of them"
    return None


@compute(returns="draws")
@checked_by(_check_resample)
def resample(
    reward: PerSequence,
    seqs: Sequences,
    *,
    weights: Literal["pow", "max_min", "max_random"] = "pow",
    power: float = 2.0,
) -> tuple[PerSequence, Metrics]:
    """Draw as many samples as the batch has, with replacement, and return how often each was drawn (PF-PPO).

    `mask="draws"` of the train node counts each sample so often. It stays in one minibatch, and is computed
    once.

    Args:
        reward: `[S]`.
        seqs: the layout of the batch.
        weights: how probabilities depend on rewards, see `algo.resampling_weights`.
        power: exponent for `pow`.

    Returns:
        Counts `[S]`, which add up to S, and metrics: the share of samples that are `drawn`.
    """
    draws = algo.resampled(algo.resampling_weights(reward, weights, power))
    return draws, {"drawn": draws > 0}
