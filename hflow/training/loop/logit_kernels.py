"""Triton kernels that read logits once: for the statistics of a softmax, and to turn them into gradients.

The first adds up with a running maximum (Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax"). Both compute in fp32 what functions of the same names in `logprobs.py` do, with its symbols.

This module imports Triton, which builds of torch for CUDA install.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096
"""Logits of a row that a program reads at once."""
_WARPS = 8


def fill_statistics(out: Tensor, logits: Tensor, temperature: float) -> None:
    """Fill `out`, `[3, C]`, with the statistics of logits `[C, V']`, also those that only entropy needs."""
    _statistics[(len(logits),)](
        *(out, logits, temperature, logits.shape[1], out.stride(0), logits.stride(0)),
        columns=_COLUMNS,
        num_warps=_WARPS,
    )


def turn_into_gradients(
    logits: Tensor,
    normaliser: Tensor,
    mean: Tensor,
    slope: Tensor,
    grad_entropy: Tensor | None,
    index: Tensor,
    added: Tensor,
    temperature: float,
) -> None:
    """Overwrite logits `[C, V']` with their gradients."""
    num_rows, num_columns = logits.shape
    of_entropy = slope if grad_entropy is None else grad_entropy
    _gradients[(num_rows, triton.cdiv(num_columns, _COLUMNS))](
        *(logits, normaliser, mean, slope, of_entropy, index.contiguous(), added.contiguous(), temperature),
        *(num_columns, logits.stride(0), of_entropy.stride(0), index.shape[1]),
        has_entropy=grad_entropy is not None,
        columns=_COLUMNS,
        num_warps=_WARPS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    out, logits, temperature, num_columns, out_row, logits_row, columns: tl.constexpr
):
    """Compute the statistics of one row (program axis 0)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    highest = -3e38  # below every logit; minus infinity times a total of 0 would be NaN
    total = tl.zeros([columns], tl.float32)
    products = tl.zeros([columns], tl.float32)
    for first in range(0, num_columns, columns):
        is_column = first + column < num_columns
        at = logits + row * logits_row + first + column
        x = tl.load(at, mask=is_column, other=float("-inf")).to(tl.float32) / temperature
        now_highest = tl.maximum(highest, tl.max(x, 0))
        less = tl.where(is_column, x - now_highest, 0.0)
        weight = tl.where(is_column, tl.exp(less), 0.0)
        shift = highest - now_highest
        shrunk = tl.exp(shift)
        products = (products + shift * total) * shrunk + weight * less
        total = total * shrunk + weight
        highest = now_highest
    tl.store(out + row, highest)
    tl.store(out + out_row + row, tl.sum(total, 0))
    tl.store(out + 2 * out_row + row, tl.sum(products, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _gradients(  # type: ignore[no-untyped-def]
    logits,
    normaliser,
    mean,
    slope,
    grad_entropy,
    index,
    added,
    temperature,
    num_columns,
    logits_row,
    entropy_row,
    num_picked,
    has_entropy: tl.constexpr,
    columns: tl.constexpr,
):
    """Compute the gradients of some columns (program axis 1) of one row (axis 0)."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * columns
    column = first + tl.arange(0, columns)
    is_column, at = column < num_columns, logits + row * logits_row + column
    x = tl.load(at, mask=is_column, other=0.0).to(tl.float32) / temperature
    gradient = tl.exp(x - tl.load(normaliser + row))
    scale = -tl.load(slope + row)
    if has_entropy:
        scale -= (x - tl.load(mean + row)) * tl.load(grad_entropy + row * entropy_row)
    gradient *= scale
    for i in range(num_picked):
        picked = tl.load(index + row * num_picked + i)
        if (picked >= first) & (picked < first + columns):
            gradient += tl.where(column == picked, tl.load(added + row * num_picked + i), 0.0)
    tl.store(at, (gradient / temperature).to(logits.dtype.element_ty), mask=is_column)
