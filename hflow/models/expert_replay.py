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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hflow.data.batches.batch import Batch
from hflow.data.batches.batch_arguments import get_column, to_tensor
from hflow.data.batches.shared_prefix import PrefixSharing
from hflow.shapes.architectures import ROUTERS
from hflow.types.routed_experts import ROUTED_EXPERTS, is_recorded


@dataclass(frozen=True)
class ReplayedExperts:
    """What the routers are to choose for the computed tokens of a micro-batch."""

    index: Tensor
    """`[U, L * K]`, an integer dtype."""
    num_tokens: Tensor
    """int64 `[U]`: how many of the T tokens a row is the choice for. 0: nothing is recorded of the token, and
    the router chooses."""
    num_rerouted: dict[int, Tensor] = field(default_factory=dict)
    """Layer (of the L) -> number of tokens for which its router would have chosen other experts. A layer that
    is computed again in a backward pass sets it again."""

    def counts(self) -> Tensor:
        """Return the tokens that would have been routed otherwise, and all recorded ones: float32 `[2]`.

        Both are sums over the layers that have run.
        """
        replayed = self.num_tokens.sum()
        rerouted = sum(self.num_rerouted.values(), torch.zeros_like(replayed))
        return torch.stack([rerouted, len(self.num_rerouted) * replayed]).float()


def replayed_experts(batch: Batch, sharing: PrefixSharing | None, device: torch.device) -> ReplayedExperts:
    """Move the engine's choice for the computed tokens of a batch to the device.

    The batch has `routed_experts`, `[T, L * K]`. Without `sharing` every token is computed.
    """
    rows = np.asarray(get_column(batch, ROUTED_EXPERTS).values)
    num_tokens = is_recorded(rows).astype(np.int64)
    if sharing is not None:
        num_tokens = num_tokens[sharing.token_of_row] * np.bincount(sharing.row_of_token)
        rows = rows[sharing.token_of_row]
    return ReplayedExperts(to_tensor(rows, device), to_tensor(num_tokens, device))


def choose_experts(ranks: Tensor, per_token: int, replayed: ReplayedExperts | None, layer: int) -> Tensor:
    """Return each token's experts, `[U, K]`: those of the largest ranks, `[U, N]`, or the engine's choice.

    The ranks are what the router ranks experts by, such as their probabilities. `layer` is an index among the
    L layers.
    """
    own = ranks.topk(per_token, dim=-1).indices
    if replayed is None:
        return own
    engine = replayed.index[:, layer * per_token : (layer + 1) * per_token].long()
    index = torch.where((replayed.num_tokens > 0)[:, None], engine, own)
    differs = (own.sort(-1).values != index.sort(-1).values).any(-1)
    replayed.num_rerouted[layer] = (differs * replayed.num_tokens).sum()
    return index


REPLAYED = "replayed_experts"
"""Keyword argument with which a model's forward passes `ReplayedExperts` to its layers."""
_ROUTERS = tuple(router.module for router in ROUTERS.values() if router.replays)
"""Names of classes in transformers that compute as `_route` does."""

Routed = tuple[Tensor, Tensor, Tensor]


def routers_of(module: nn.Module) -> list[Any]:
    """Return the routers of a module in the order of its layers; none if it is dense."""
    return [router for router in module.modules() if type(router).__name__ in _ROUTERS]


def let_routers_replay(layers: Iterable[nn.Module]) -> None:
    """Let the routers of decoder layers choose what the argument `REPLAYED` says, where it is passed.

    Each layer passes it to its router when its forward runs, in a recomputation too.
    """
    with_router = [(layer, router) for layer in layers for router in routers_of(layer)]
    for number, (layer, router) in enumerate(with_router):
        router.replayed = None
        router.forward = partial(_route, router, number, router.forward)
        layer.forward = partial(_pass_to_router, layer.forward, router)


def _pass_to_router(forward: Callable[..., Any], router: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a layer's forward whose router replays what the layer's arguments say."""
    router.replayed = kwargs.get(REPLAYED)
    return forward(*args, **kwargs)


def _route(router: Any, number: int, own_forward: Callable[[Tensor], Routed], hidden: Tensor) -> Routed:
    """Return logits `[U, N]`, weights `[U, K]` and experts `[U, K]`, as the router's own forward does."""
    replayed: ReplayedExperts | None = router.replayed
    router.replayed = None
    if replayed is None:
        return own_forward(hidden)
    logits = linear(hidden.reshape(-1, router.hidden_dim), router.weight, getattr(router, "bias", None))
    probabilities = logits.softmax(-1, dtype=torch.float32)
    index = choose_experts(probabilities, router.top_k, replayed, number)
    chosen = probabilities.gather(-1, index)
    if getattr(router, "norm_topk_prob", True):
        chosen = chosen / chosen.sum(-1, keepdim=True)
    is_mixtral = type(router).__name__ == ROUTERS["mixtral"].module  # its weights are in fp32
    return logits, chosen if is_mixtral else chosen.to(logits.dtype), index
