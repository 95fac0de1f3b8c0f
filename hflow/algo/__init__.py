"""Advantages, KL estimators and losses: pure functions on packed tensors."""

from hflow.algo.advantages import explained_variance, gae, group_advantage, leave_one_out, whiten
from hflow.algo.kl import adapted_kl_weight, entropy, kl_estimate, kl_k1, kl_k2, kl_k3
from hflow.algo.losses import (
    clipped_surrogate,
    clipped_value_loss,
    cross_entropy,
    decoupled_surrogate,
    loglinear_prox,
    pairwise_loss,
)

__all__ = [
    "adapted_kl_weight",
    "clipped_surrogate",
    "clipped_value_loss",
    "cross_entropy",
    "decoupled_surrogate",
    "entropy",
    "explained_variance",
    "gae",
    "group_advantage",
    "kl_estimate",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "leave_one_out",
    "loglinear_prox",
    "pairwise_loss",
    "whiten",
]
