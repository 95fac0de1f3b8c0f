"""Advantages, KL estimators and losses: pure functions on packed tensors."""

from hflow.algo.advantages import explained_variance, gae, group_advantage, leave_one_out, whiten
from hflow.algo.kl import MAX_KL, adapted_kl_weight, entropy, kl_estimate, kl_k1, kl_k2, kl_k3
from hflow.algo.losses import (
    behav_weight,
    clipped_surrogate,
    clipped_value_loss,
    cross_entropy,
    decoupled_surrogate,
    is_clipped,
    loglinear_prox,
    pairwise_loss,
)
from hflow.algo.ratios import is_bounded, policy_ratio

__all__ = [
    "MAX_KL",
    "adapted_kl_weight",
    "behav_weight",
    "clipped_surrogate",
    "clipped_value_loss",
    "cross_entropy",
    "decoupled_surrogate",
    "entropy",
    "explained_variance",
    "gae",
    "group_advantage",
    "is_bounded",
    "is_clipped",
    "kl_estimate",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "leave_one_out",
    "loglinear_prox",
    "pairwise_loss",
    "policy_ratio",
    "whiten",
]
