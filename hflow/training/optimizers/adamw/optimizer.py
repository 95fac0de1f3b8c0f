"""`GroupAdamW`: AdamW on groups of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hflow.training.optimizers.base import BaseOptimizer


class GroupAdamW(BaseOptimizer):
    """AdamW (Loshchilov and Hutter 2019): what torch's fused AdamW does, with the same kernel."""

    @override
    def _step(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        means, squares = map(list, zip(*map(self.states_of, weights), strict=True))
        update_adamw(group, weights, gradients, means, squares)

    @override
    def states_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        return self._state(weight, "exp_avg", "exp_avg_sq")


def update_adamw(
    group: dict[str, Any],
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
) -> None:
    """Update weights, in fp32, and their moments in place.

    The group has the settings of AdamW, and the number of this step in `step`.
    """
    beta1, beta2 = group["betas"]
    count = torch.full((), float(group["step"]), device=weights[0].device)
    torch._fused_adamw_(
        weights,
        gradients,
        means,
        squares,
        max_exp_avg_sqs=[],
        state_steps=[count] * len(weights),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
