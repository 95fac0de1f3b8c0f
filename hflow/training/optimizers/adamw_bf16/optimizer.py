"""`GroupAdamWBf16`: AdamW with moments in bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hflow.planner.plan.optimizers import CHUNK
from hflow.training.optimizers.adamw.optimizer import update_adamw
from hflow.training.optimizers.base import BaseOptimizer

_LOW_BITS = 16
"""The bits of an fp32 number that bf16 has not."""


class GroupAdamWBf16(BaseOptimizer):
    """AdamW whose moments are kept in bf16, and rounded stochastically after each step.

    A step changes a moving average by less than half of what bf16 resolves, so that rounding to the nearest
    number would leave it where it is. The random numbers depend on the number of the step, so that a resumed
    model in the same layout continues bit for bit.
    """

    @override
    def _step(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        generator = torch.Generator(weights[0].device).manual_seed(group["step"])
        for weight, gradient in zip(weights, gradients, strict=True):
            flat = (x.view(-1).split(CHUNK) for x in (weight, gradient, *self.states_of(weight)))
            for parts in zip(*flat, strict=True):
                _update_chunk(group, generator, *parts)

    @override
    def states_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        return self._state(weight, "exp_avg", "exp_avg_sq", dtype=torch.bfloat16)


def _update_chunk(
    group: dict[str, Any],
    generator: torch.Generator,
    weight: Tensor,
    gradient: Tensor,
    *states: Tensor,
) -> None:
    """Update entries of a weight, and their moments."""
    mean, square = (state.float() for state in states)
    update_adamw(group, [weight], [gradient], [mean], [square])
    for state, moment in zip(states, (mean, square), strict=True):
        round_stochastically(moment, random_bits(len(moment), generator))
        state.copy_(moment)


def random_bits(num: int, generator: torch.Generator) -> Tensor:
    """Return random numbers of 16 bits, int16 `[num]`. Four are drawn at once, which takes most of a step."""
    drawn = torch.empty(-(-num // 4), dtype=torch.int64, device=generator.device)
    return drawn.random_(-(1 << 63), None, generator=generator).view(torch.int16)[:num]


def round_stochastically(x: Tensor, noise: Tensor) -> None:
    """Round fp32 numbers to neighbours that bf16 has, in place, so that their expectation is the number.

    The neighbour that is larger in size has the probability of the number's distance from the other one, in
    units of the distance between both: it is added to a random number below that, and cut off.

    Args:
        x: fp32 of any shape.
        noise: int16 of the same shape, from `random_bits`.
    """
    bits = x.view(torch.int32)
    bits += noise
    bits += 1 << (_LOW_BITS - 1)  # the sum of both is at least 0
    bits &= -(1 << _LOW_BITS)
