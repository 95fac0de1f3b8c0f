"""The routers of models of transformers, and what makes them replay the engine's choice of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hflow.backends.common.expert_replay import ReplayedExperts, choose_experts

REPLAYED = "replayed_experts"
"""Keyword argument with which a model's forward passes `ReplayedExperts` to its layers."""
_ROUTERS = ("Qwen3MoeTopKRouter",)
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
    logits = linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    probabilities = logits.softmax(-1, dtype=torch.float32)
    chosen, index = choose_experts(probabilities, router.top_k, replayed, number)
    if router.norm_topk_prob:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return logits, chosen.to(logits.dtype), index
