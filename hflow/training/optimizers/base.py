"""`BaseOptimizer`, which hflow's own optimizers derive from."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hflow.base.devices import is_gpu
from hflow.planner.plan.optimizers import CHUNK, CPU_CHUNK


class BaseOptimizer(torch.optim.AdamW, abc.ABC):
    """An optimizer that counts steps once per group of parameters, as fused kernels do.

    Megatron's distributed checkpoints expect this layout of the state: loading that of torch's optimizers,
    which count steps for each parameter, would leave all parameters with one shared count. Megatron takes
    subclasses of AdamW only.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state unchanged; AdamW would look for its own step counts."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            pairs = [(p, p.grad) for p in group["params"] if p.grad is not None]
            if pairs:
                group["step"] = group.get("step", 0) + 1
                weights, gradients = map(list, zip(*pairs, strict=True))
                self._step(group, weights, gradients)

    @abc.abstractmethod
    def _step(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Update weights of a group. Their gradients are not used afterwards."""

    @abc.abstractmethod
    def states_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return a weight's states, as `GroupOptimizer.states_of`."""

    def load_states(self, weight: Tensor, states: Sequence[Tensor]) -> None:
        """Take states, as `GroupOptimizer.load_states`; those of `states_of` are the optimizer's own here."""

    def _is_in_layers(self, weight: Tensor) -> bool:
        """Return whether a weight is a matrix of a layer."""
        groups = (group["params"] for group in self.param_groups if group["in_layers"])
        return any(weight is one for params in groups for one in params)

    def _state(self, weight: Tensor, *names: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """Return states of a weight; at first zeros."""
        state = self.state[weight]
        if not state:
            state.update({name: torch.zeros_like(weight, dtype=dtype) for name in names})
        return tuple(state[name] for name in names)


def chunk_size(device: torch.device) -> int:
    """Return the most entries of a weight that are updated at once on a device."""
    return CHUNK if is_gpu(device.type) else CPU_CHUNK
