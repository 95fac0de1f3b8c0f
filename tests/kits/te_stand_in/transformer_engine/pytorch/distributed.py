"""Recomputation in FP8. The trackers of random states are megatron's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast


class CudaRNGStatesTracker:
    """A name that megatron derives from."""


@contextmanager
def activation_recompute_forward(**options: bool) -> Iterator[None]:
    """Do nothing, as no recipe has scales that would be restored."""
    yield


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool,
    get_rng_state_tracker: Callable[[], Any],
    tp_group: Any,
) -> Any:
    """Call a function without keeping what it computes, and again in the backward pass."""
    assert not distribute_saved_activations
    return _Checkpoint.apply(function, *args)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        ctx.function, ctx.recipe = function, FP8GlobalStateManager.get_fp8_recipe()
        ctx.others = [None if isinstance(one, Tensor) else one for one in args]
        ctx.places = [place for place, one in enumerate(args) if isinstance(one, Tensor)]
        ctx.save_for_backward(*(args[place] for place in ctx.places))
        with torch.no_grad():
            return function(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        args = list(ctx.others)
        for place, saved in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[place] = saved.detach().requires_grad_(saved.requires_grad)
        with torch.enable_grad(), fp8_autocast(ctx.recipe is not None, fp8_recipe=ctx.recipe):
            outputs = ctx.function(*args)
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if isinstance(out, Tensor)]
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, *(one.grad if isinstance(one, Tensor) else None for one in args)
