"""Compares packed attention, forward and backward, with attention that plain products compute in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hflow.models.packed_attention import PackedLayout, attend
from hflow.types.kernels import AttentionKernel

LENGTHS = (1, 7, 64, 129, 33)
"""Tokens of the sequences: of one token, within a block of a kernel, of whole blocks, and one more."""
NUM_HEADS, NUM_KEY_HEADS, HEAD_SIZE = 8, 2, 64


class AttentionError(NamedTuple):
    """How far a kernel's results are from those in float64, relative to the largest of these."""

    kernel: AttentionKernel
    output: float
    gradient: float
    """The largest of the gradients by queries, keys and values."""


def attention_error(device: str, dtype: torch.dtype) -> AttentionError:
    """Compute attention of several sequences of different lengths with grouped queries.

    Raises:
        RuntimeError: what torch raises where a kernel does not run.
    """
    generator = torch.Generator().manual_seed(0)
    heads = (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
    drawn = [torch.randn(sum(LENGTHS), n, HEAD_SIZE, generator=generator).to(dtype) for n in heads]
    upstream = torch.randn(sum(LENGTHS), NUM_HEADS, HEAD_SIZE, generator=generator).to(dtype)
    layout = PackedLayout.of(np.array(LENGTHS), device, dtype)
    q, k, v = (x.to(device).requires_grad_() for x in drawn)
    output = attend(q, k, v, layout, None)
    gradients = torch.autograd.grad(output, (q, k, v), upstream.to(device))
    exact_inputs = [x.double().requires_grad_() for x in drawn]
    exact = _exact(*exact_inputs)
    exact_gradients = torch.autograd.grad(exact, exact_inputs, upstream.double())
    errors = [_error(*pair) for pair in zip(gradients, exact_gradients, strict=True)]
    return AttentionError(layout.kernel, _error(output, exact), max(errors))


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention within each sequence: q `[T, H, d]`, k and v `[T, G, d]` -> `[T, H, d]`."""
    sequences = []
    for queries, keys, values in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        keys, values = (x.repeat_interleave(NUM_HEADS // NUM_KEY_HEADS, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / HEAD_SIZE**0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        sequences.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values)
        )
    return torch.cat(sequences)


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().cpu().double() - exact.detach()).abs().max() / exact.detach().abs().max())
