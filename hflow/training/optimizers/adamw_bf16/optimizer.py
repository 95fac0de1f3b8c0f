"""`GroupAdamWBf16`: AdamW with moments in bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hflow.training.optimizers.adamw.optimizer import update_adamw
from hflow.training.optimizers.base import BaseOptimizer, chunk_size

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
        device, largest = weights[0].device, max(weight.numel() for weight in weights)
        size = min(largest, chunk_size(device))
        noise = Noise(size, group["step"], device)
        for weight, gradient in zip(weights, gradients, strict=True):
            flat = (x.view(-1).split(size) for x in (weight, gradient, *self.states_of(weight)))
            for parts in zip(*flat, strict=True):
                _update_chunk(group, noise, *parts)

    @override
    def states_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        return self._state(weight, "exp_avg", "exp_avg_sq", dtype=torch.bfloat16)


class Noise:
    """Random numbers of 16 bits, int32 `[size]`.

    Each use takes the numbers of the last one with some of their bits inverted, the same of all, which are
    drawn. So every number is uniform, and any two are independent, also of different uses. To draw all of
    them again would take more than the rest of a step. At most `size` are used at once.
    """

    def __init__(self, size: int, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._numbers = self._draw(size)

    def take(self, num: int) -> Tensor:
        """Return as many numbers, until the next use."""
        return self._numbers.bitwise_xor_(self._draw(1))[:num]

    def _draw(self, num: int) -> Tensor:
        drawn = torch.empty(num, dtype=torch.int32, device=self._generator.device)
        return drawn.random_(0, 1 << _LOW_BITS, generator=self._generator)


def _update_chunk(
    group: dict[str, Any], noise: Noise, weight: Tensor, gradient: Tensor, *states: Tensor
) -> None:
    """Update entries of a weight, and their moments."""
    mean, square = (state.float() for state in states)
    update_adamw(group, [weight], [gradient], [mean], [square])
    for state, moment in zip(states, (mean, square), strict=True):
        round_stochastically(moment, noise.take(len(moment)))
        state.copy_(moment)


def round_stochastically(x: Tensor, noise: Tensor) -> None:
    """Round fp32 numbers to neighbours that bf16 has, in place, so that their expectation is the number.

    The neighbour that is larger in size has the probability of the number's distance from the other one, in
    units of the distance between both: it is added to a random number below that, and cut off. Both are of
    one shape; the noise is int32, random numbers of 16 bits.
    """
    bits = x.view(torch.int32)
    bits += noise
    bits &= -(1 << _LOW_BITS)
