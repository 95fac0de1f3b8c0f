"""`GroupAdamW8Bit`: AdamW with moments of matrices of layers in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hflow.base.devices import is_gpu
from hflow.data.batches.device_copy import to_device
from hflow.training.optimizers.adamw.optimizer import update_adamw
from hflow.training.optimizers.adamw_8bit.blocks import BLOCK
from hflow.training.optimizers.base import BaseOptimizer, chunk_size

_NUM_DECADES = 7
_TINY = torch.finfo(torch.float32).tiny


class GroupAdamW8Bit(BaseOptimizer):
    """AdamW whose moments of matrices of layers are quantised in blocks; those of other weights are fp32.

    Steps are computed in fp32 (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization"). Unlike
    there, a square that is not 0 does not become 0, which the next step would divide by.
    """

    @override
    def _step(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        if not group["in_layers"]:
            means, squares = map(list, zip(*map(self._moments_of, weights), strict=True))
            update_adamw(group, weights, gradients, means, squares)
            return
        size = chunk_size(weights[0].device)
        for weight, gradient in zip(weights, gradients, strict=True):
            stored = (x.split(size // BLOCK) for x in self._quantized(weight))
            flat = (x.view(-1).split(size) for x in (weight, gradient))
            for parts in zip(*flat, *stored, strict=True):
                _update_chunk(group, *parts)

    @override
    def states_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        if not self._is_in_layers(weight):
            return self._moments_of(weight)
        codes1, scales1, codes2, scales2 = self._quantized(weight)
        moments = dequantize(codes1, scales1, is_signed=True), dequantize(codes2, scales2, is_signed=False)
        return tuple(x.view(-1)[: weight.numel()].view(weight.shape) for x in moments)

    @override
    def load_states(self, weight: Tensor, states: Sequence[Tensor]) -> None:
        if self._is_in_layers(weight):
            codes1, scales1, codes2, scales2 = self._quantized(weight)
            for state, codes, scales, is_signed in zip(
                states, (codes1, codes2), (scales1, scales2), (True, False), strict=True
            ):
                moment = torch.zeros(codes.shape, device=codes.device)
                moment.view(-1)[: weight.numel()] = state.reshape(-1)
                quantize(moment, codes, scales, is_signed=is_signed)

    def _moments_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        return self._state(weight, "exp_avg", "exp_avg_sq")

    def _quantized(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return codes and scales of both moments; at first of zeros. What fills the last block stays 0."""
        state, num_blocks = self.state[weight], -(-weight.numel() // BLOCK)
        if not state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(num_blocks, BLOCK, dtype=torch.uint8, device=weight.device)
                state[f"{name}_scale"] = torch.zeros(num_blocks, device=weight.device)
        return tuple(state.values())


def _update_chunk(
    group: dict[str, Any],
    weight: Tensor,
    gradient: Tensor,
    codes1: Tensor,
    scales1: Tensor,
    codes2: Tensor,
    scales2: Tensor,
) -> None:
    """Update entries `[n]` of a weight, and both of its moments in `ceil(n / BLOCK)` blocks."""
    mean = dequantize(codes1, scales1, is_signed=True)
    square = dequantize(codes2, scales2, is_signed=False)
    moments = ([x.view(-1)[: weight.numel()]] for x in (mean, square))
    update_adamw(group, [weight], [gradient], *moments)
    quantize(mean, codes1, scales1, is_signed=True)
    quantize(square, codes2, scales2, is_signed=False)


def quantize(x: Tensor, codes: Tensor, scales: Tensor, *, is_signed: bool) -> None:
    """Write numbers as places in a map, and a scale for each block of them.

    The place is that of the number in `dynamic_map` which is nearest to the given one divided by the scale.
    Without signs, only 0 itself becomes 0.

    Args:
        x: fp32 `[blocks, BLOCK]`; it is overwritten.
        codes: uint8 `[blocks, BLOCK]`, written: the places.
        scales: fp32 `[blocks]`, written: the largest size of a number.
        is_signed: whether there are negative numbers.
    """
    torch.maximum(x.amax(1), x.amin(1).neg_(), out=scales).clamp_(min=_TINY)
    x.div_(scales[:, None])
    if is_gpu(x.device.type):
        _, limits = _map_on(x.device, is_signed)
        codes.copy_(torch.bucketize(x, limits, out_int32=True))
        return
    # The search in 255 limits takes a CPU 40 ns for each number, tables of its cell 4 ns.
    places, limits = _cells(is_signed)
    cells = (x.view(torch.int32) >> 16).bitwise_and_(0xFFFF).view(-1)
    torch.index_select(places, 0, cells, out=codes.view(-1))
    limits = limits.index_select(0, cells)
    del cells
    codes.view(-1).add_((x.view(-1) > limits).view(torch.uint8))


def dequantize(codes: Tensor, scales: Tensor, *, is_signed: bool) -> Tensor:
    """Return the numbers fp32 `[blocks, BLOCK]` that `quantize` wrote. Quantised again, they are the same."""
    values, _ = _map_on(codes.device, is_signed)
    return values.index_select(0, codes.view(-1).int()).view(codes.shape).mul_(scales[:, None])


def dynamic_map(*, is_signed: bool) -> Tensor:
    """Return the 256 numbers of the dynamic map, in ascending order.

    From 0.1 to 1 it has the middles of 64 equal parts, and in each smaller power of ten those of half as
    many; the same with a minus; and 0 and 1. Without signs there are 128 parts (Dettmers 2016, "8-bit
    approximations for parallelism in deep learning"; bitsandbytes computes the same). The smallest number is
    -1 here, so that the number that is its block's scale is kept as it is, whatever its sign.
    """
    numbers = [torch.tensor([0.0, 1.0])]
    for decade in range(_NUM_DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (_NUM_DECADES - decade - is_signed) + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0**-decade
        numbers += [middles, -middles] if is_signed else [middles]
    result = torch.cat(numbers).sort().values
    if is_signed:
        result[0] = -1
    return result


@cache
def _map_on(device: torch.device, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Return a map, and the limits between its numbers."""
    numbers = dynamic_map(is_signed=is_signed)
    limits = (numbers[1:] + numbers[:-1]) / 2
    if not is_signed:
        limits[0] = 0
    return to_device(numbers, device), to_device(limits, device)


@cache
def _cells(is_signed: bool) -> tuple[Tensor, Tensor]:
    """Return, for fp32 numbers of the same 16 upper bits, the place of the smallest, and the limit above it.

    Numbers between -1 and 1 that have these bits in common are on both sides of one limit at most.
    """
    _, limits = _map_on(torch.device("cpu"), is_signed)
    bits = torch.arange(1 << 16) << 16
    bits[1 << 15 :] += 0xFFFF  # of negative numbers, the smallest is largest in size
    places = torch.bucketize(bits.int().view(torch.float32), limits)
    return places.to(torch.uint8), torch.cat([limits, torch.tensor([torch.inf])])[places]
