"""Routing replay: layers compute with the experts that the engine chose for each token.

Engine and trainer choose different experts for some tokens, as two experts may be nearly equal and their
arithmetic differs by rounding. Such tokens get other log-probs with the same weights. With replay the trainer
takes the engine's experts; their weights are those of its own router, so that gradients reach it (Ma et al.
2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv:2510.11370).

Axes: T packed tokens, U computed tokens (T without repeated prompt prefixes), L layers with experts, K
experts of a token, N experts of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hflow.backends.interface import REROUTED, NodeCall
from hflow.data.batch import Batch
from hflow.data.batch_arguments import FRAMEWORK_READ, get_column, to_tensor
from hflow.data.routed_experts import is_recorded
from hflow.data.shared_prefix import PrefixSharing

if TYPE_CHECKING:
    from hflow.backends.common.metrics import MetricAccumulator

ROUTED_EXPERTS = "routed_experts"
"""The column with the engine's choice, `[T, L * K]`."""


@dataclass(frozen=True)
class ReplayedExperts:
    """What the routers are to choose for the computed tokens of a micro-batch."""

    index: Tensor
    """`[U, L * K]`, an integer dtype."""
    known: Tensor
    """bool `[U, 1]`: the tokens of which `index` has the engine's choice. The router chooses for others."""
    num_known: int
    num_rerouted: dict[int, Tensor] = field(default_factory=dict)
    """Layer (of the L) -> number of tokens for which its router would have chosen other experts. A layer that
    is computed again in a backward pass sets it again."""


def replays_experts(call: NodeCall) -> bool:
    """Return whether a node computes with the engine's experts."""
    return any(read.parameter == FRAMEWORK_READ + ROUTED_EXPERTS for read in call.reads)


def replayed_experts(batch: Batch, sharing: PrefixSharing | None, device: torch.device) -> ReplayedExperts:
    """Move the engine's choice for the computed tokens of a batch to the device.

    Args:
        batch: has `routed_experts`.
        sharing: which of its tokens are computed once; None: every token is computed.
        device: of the model.
    """
    rows = np.asarray(get_column(batch, ROUTED_EXPERTS).values)
    if sharing is not None:
        rows = rows[sharing.token_of_row]
    known = is_recorded(rows)
    return ReplayedExperts(to_tensor(rows, device), to_tensor(known[:, None], device), int(known.sum()))


def choose_experts(
    probabilities: Tensor, per_token: int, replayed: ReplayedExperts | None, layer: int
) -> tuple[Tensor, Tensor]:
    """Return the probabilities of each token's experts, and the experts: both `[U, K]`.

    Args:
        probabilities: of the router, `[U, N]`.
        per_token: K.
        replayed: the engine's choice; None: the K experts of the largest probabilities.
        layer: index among the L layers.
    """
    chosen, own = probabilities.topk(per_token, dim=-1)
    if replayed is None:
        return chosen, own
    engine = replayed.index[:, layer * per_token : (layer + 1) * per_token].long()
    index = torch.where(replayed.known, engine, own)
    differs = (own.sort(-1).values != index.sort(-1).values).any(-1)
    replayed.num_rerouted[layer] = differs.sum()
    return probabilities.gather(-1, index), index


def add_rerouted(metrics: MetricAccumulator, replayed: ReplayedExperts) -> None:
    """Add the share of tokens and layers of a micro-batch that its routers would have routed otherwise."""
    counts = list(replayed.num_rerouted.values())
    if replayed.num_known:
        metrics.add_share(REROUTED.suffix, torch.stack(counts).sum(), len(counts) * replayed.num_known)
