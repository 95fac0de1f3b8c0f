"""The mathematics of the recipes: pure functions on packed tensors, nothing of hflow but its types."""

from hflow.algo.advantages import gae, group_advantage, whiten
from hflow.algo.kl import entropy, kl_k1, kl_k2, kl_k3
from hflow.algo.losses import (
    clipped_surrogate,
    clipped_value_loss,
    cross_entropy,
    decoupled_surrogate,
    loglinear_prox,
)

__all__ = [
    "clipped_surrogate",
    "clipped_value_loss",
    "cross_entropy",
    "decoupled_surrogate",
    "entropy",
    "gae",
    "group_advantage",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "loglinear_prox",
    "whiten",
]
