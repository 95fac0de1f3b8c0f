"""`GroupSGD`: stochastic gradient descent on groups of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hflow.training.optimizers.base import BaseOptimizer


class GroupSGD(BaseOptimizer):
    """Stochastic gradient descent with momentum: `b = m b + g`, `w = (1 - lr d) w - lr b`.

    With Nesterov's momentum, `g + m b` takes the place of b. Without weight decay d it computes what torch's
    SGD does; the weight decay of that is part of g.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, momentum: float, nesterov: bool) -> None:
        """Take groups of parameters, each with its weight decay d.

        `momentum` is the decay m of the sum of gradients; 0: a step is the gradient alone.
        """
        super().__init__(groups, lr=lr)
        self._momentum, self._nesterov = momentum, nesterov

    @override
    def _step(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._fused_sgd_(
            weights,
            gradients,
            [self.states_of(weight)[0] for weight in weights] if self._momentum else [],
            weight_decay=0.0,  # it would be added to the gradient
            momentum=self._momentum,
            lr=group["lr"],
            dampening=0.0,
            nesterov=self._nesterov,
            maximize=False,
            is_first_step=False,
        )

    @override
    def states_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        return self._state(weight, "momentum_buffer") if self._momentum else ()
