"""Frozen matrices in 4 bits (NF4, Dettmers et al. 2023, "QLoRA"), by the library bitsandbytes.

Blocks of 64 numbers have one factor each, and these are stored in 8 bits, in blocks of 256. Matrices are
rounded on the CPU, so that a trainer and its engines have the same ones, whatever their devices are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from hflow.shapes.model_shape import NF4_BLOCK, NF4_NESTED_BLOCK


class Nf4Linear(nn.Linear):
    """A linear layer whose frozen matrix is whole only while it is multiplied.

    Its buffers are no parameters, so that FSDP leaves them on every rank, and checkpoints do not have them.
    """

    def __init__(self, layer: nn.Linear) -> None:
        """Round the matrix of a layer, and take its bias. On the meta device the buffers have no values."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.dtype = layer.weight.dtype
        for name, tensor in _quantized(layer.weight.detach()).items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The rounded matrix, a new tensor `[outputs, inputs]`."""
        return _whole(self._buffers, (self.out_features, self.in_features), self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output `[..., outputs]`."""
        output: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return output


class _Product(torch.autograd.Function):
    """Makes the matrix whole in both passes, so that it is not kept between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.weight, layer.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.weight, None


def rounded(weight: Tensor) -> Tensor:
    """Return a matrix in host memory as an `Nf4Linear` has it."""
    return _whole(_quantized(weight), weight.shape, weight.dtype)


def is_rounded(name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor is one of those that are kept in 4 bits: a matrix of a decoder layer."""
    return ".layers." in name and len(shape) == 2


def _quantized(weight: Tensor) -> dict[str, Tensor]:
    if weight.is_meta:
        names = ("packed", "absmax", "code", "offset", "nested_absmax", "nested_code")
        return {name: torch.empty(0, device="meta") for name in names}
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        weight.contiguous(), blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4"
    )
    nested: Any = state.state2
    return {
        "packed": packed,
        "absmax": state.absmax,
        "code": state.code,
        "offset": state.offset,
        "nested_absmax": nested.absmax,
        "nested_code": nested.code,
    }


@torch.no_grad()
def _whole(buffers: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if buffers["packed"].is_meta:
        return torch.empty(shape, dtype=dtype, device="meta")
    from bitsandbytes.functional import QuantState, dequantize_4bit

    nested = QuantState(
        absmax=buffers["nested_absmax"],
        code=buffers["nested_code"],
        blocksize=NF4_NESTED_BLOCK,
        dtype=torch.float32,
    )
    state = QuantState(
        absmax=buffers["absmax"],
        shape=torch.Size(shape),
        code=buffers["code"],
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=buffers["offset"],
        state2=nested,
    )
    whole: Tensor = dequantize_4bit(buffers["packed"], state)
    return whole
