"""`GroupMuon`: Muon for matrices of layers, and AdamW for other weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hflow.training.optimizers.adamw.optimizer import update_adamw
from hflow.training.optimizers.base import BaseOptimizer
from hflow.training.optimizers.muon.iterations import NUM_ITERATIONS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The factors of `a x + b x^3 + c x^5`, which moves singular values towards 1 (Jordan et al. 2024)."""
EPS = 1e-7


def orthogonalize(x: Tensor) -> Tensor:
    """Return matrices with singular values near 1 and the singular vectors of the given ones.

    Newton-Schulz iterations (Jordan et al. 2024): five of `x = a x + b (x x^T) x + c (x x^T)^2 x`, from x
    divided by its Frobenius norm. In exact arithmetic they map singular values that are at least 0.003 of the
    norm to between 0.68 and 1.13.

    A tall x is multiplied from the right instead, `x (x^T x)`: where its transpose was written, torch had no
    library for products in bf16 on a CPU. It is `[matrices, rows, columns]`, contiguous, and overwritten.
    """
    a, b, c = COEFFICIENTS
    rows, columns = x.shape[-2:]
    is_tall, short = rows > columns, min(rows, columns)
    x.div_(torch.linalg.matrix_norm(x, keepdim=True).clamp_(min=EPS))
    other, gram = torch.empty_like(x), x.new_empty(len(x), short, short)
    polynomial = torch.empty_like(gram)
    for _ in range(NUM_ITERATIONS):
        torch.bmm(*((x.mT, x) if is_tall else (x, x.mT)), out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, *((x, polynomial) if is_tall else (polynomial, x)), beta=a, out=other)
        x, other = other, x
    return x


class GroupMuon(BaseOptimizer):
    """Muon (Jordan et al. 2024) for matrices of layers, and AdamW for other weights.

    Gradients g of a matrix are averaged, `b = m b + (1 - m) g`, with Nesterov's momentum `m b + (1 - m) g`
    taking the place of b. Its singular values are replaced by numbers near 1 (`orthogonalize`), and the
    result U is scaled to the size of AdamW's updates, so that both have one learning rate (Liu et al. 2025,
    "Muon is scalable for LLM training"): `w = (1 - lr d) w - lr 0.2 sqrt(max(rows, columns)) U`.

    `begin_step` replaces the gradients of matrices by directions. `WholeMatrices` replaces these by updates,
    with `whole_update` and `scale`, before `step`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """Take groups of parameters. Muon updates those with `in_layers`, AdamW the others.

        `momentum` is the decay m of Muon's moving average; `betas` and `eps` are those of AdamW.
        """
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        self._momentum, self._nesterov = momentum, nesterov

    whole_update = staticmethod(orthogonalize)

    @torch.no_grad()
    def begin_step(self) -> None:
        """Replace the gradient of each matrix by the direction of its update, in place."""
        for group in self.param_groups:
            held = [weight for weight in group["params"] if weight.grad is not None]
            if not group["in_layers"] or not held:
                continue
            averages = [self._momentum_of(weight) for weight in held]
            gradients = [weight.grad for weight in held]
            torch._foreach_lerp_(averages, gradients, 1 - self._momentum)
            if self._nesterov:
                torch._foreach_lerp_(gradients, averages, self._momentum)
            else:
                torch._foreach_copy_(gradients, averages)

    @staticmethod
    def scale(rows: int, columns: int) -> float:
        """Return the factor of a matrix's update."""
        return 0.2 * math.sqrt(max(rows, columns))

    @override
    def _step(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        if group["in_layers"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, gradients, alpha=-group["lr"])
        else:
            means, squares = map(list, zip(*map(self._moments_of, weights), strict=True))
            update_adamw(group, weights, gradients, means, squares)

    @override
    def states_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        if self._is_in_layers(weight):
            return (self._momentum_of(weight),)
        return self._moments_of(weight)

    def _momentum_of(self, weight: Tensor) -> Tensor:
        return self._state(weight, "momentum_buffer")[0]

    def _moments_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        return self._state(weight, "exp_avg", "exp_avg_sq")
