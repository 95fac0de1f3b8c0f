"""AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class GroupAdamW(torch.optim.AdamW):
    """AdamW that counts steps once per group of parameters, as fused kernels do.

    It computes what torch's fused AdamW does, with the same kernel. Megatron's distributed checkpoints expect
    this layout of the state: loading torch's own, which counts steps for each parameter, would leave all
    parameters with one shared count. It derives from AdamW because megatron's optimizer requires that.
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

    def _step(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        means, squares = map(list, zip(*map(self.states_of, weights), strict=True))
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

    def states_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the averages of a weight's gradient and of the squared gradient; at first zeros."""
        state = self.state[weight]
        if not state:
            state.update(exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        return state["exp_avg"], state["exp_avg_sq"]
