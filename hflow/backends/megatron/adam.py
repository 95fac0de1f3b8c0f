"""AdamW with the state of fused kernels: one step count for each group of parameters.

Megatron's distributed checkpoints expect this layout. With torch's own AdamW, which counts steps for each
parameter, loading them leaves all parameters with one shared count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class GroupAdamW(torch.optim.AdamW):
    """Computes what torch's fused AdamW does, by the same kernel.

    It is an AdamW because megatron's optimizer takes no other.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state as it is; AdamW would look for its own step counts."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        assert closure is None, "closures are not called"
        for group in self.param_groups:
            pairs = [(p, p.grad) for p in group["params"] if p.grad is not None]
            if pairs:
                group["step"] = group.get("step", 0) + 1
                weights, gradients = map(list, zip(*pairs, strict=True))
                self._step(group, weights, gradients)

    def _step(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        means, squares = self.moments(weights)
        beta1, beta2 = group["betas"]
        count = torch.tensor(float(group["step"]), device=weights[0].device)
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

    def moments(self, weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The averages of each weight's gradient, and of the gradient's square."""
        for p in weights:
            if not self.state[p]:
                self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        states = [self.state[p] for p in weights]
        return [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
