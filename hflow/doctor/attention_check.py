"""Compares packed attention, forward and backward, with attention that plain products compute in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hflow.data.batches.shared_prefix import PrefixSharing
from hflow.models.attention_kernels import CAUSAL, Reach
from hflow.models.packed_attention import PackedLayout, attend
from hflow.types.kernels import AttentionKernel

LENGTHS = (1, 7, 64, 129, 33)
"""Tokens of the sequences: of one token, within a block of a kernel, of whole blocks, and one more."""
NUM_HEADS, NUM_KEY_HEADS, HEAD_SIZE = 8, 2, 64
NUM_SHARED = 20
"""Tokens with which the last sequences begin alike, where prompts are shared."""
_SINKS = torch.linspace(-2, 4, NUM_HEADS)


class AttentionCase(NamedTuple):
    """What is computed. A mask from the wrong end of the keys shows only where queries are fewer."""

    shares_prompts: bool = False
    """Whether sequences have fewer queries than keys, as answers to one prompt in training."""
    reach: Reach = CAUSAL


CASES = {
    "": AttentionCase(),
    " of shared prompts": AttentionCase(True),
    " in a window": AttentionCase(True, Reach(window=24)),
    " with sinks": AttentionCase(True, Reach(sinks=_SINKS)),
    " with sinks in a window": AttentionCase(True, Reach(24, _SINKS)),
}
"""Cases by how their names end."""


class AttentionError(NamedTuple):
    """How far a kernel's results are from those in float64, relative to the largest of these."""

    kernel: AttentionKernel
    """The one for attention without sinks."""
    output: float
    gradient: float
    """The largest of the gradients by queries, keys, values and sinks."""


def attention_error(device: str, dtype: torch.dtype, case: AttentionCase) -> AttentionError:
    """Compute attention of several sequences of different lengths with grouped queries.

    Raises:
        RuntimeError: what torch raises where a kernel does not run.
    """
    generator = torch.Generator().manual_seed(0)
    heads = (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
    sharing = _sharing(NUM_SHARED if case.shares_prompts else 0)
    num_rows = len(sharing.token_of_row)
    drawn = [torch.randn(num_rows, n, HEAD_SIZE, generator=generator).to(dtype) for n in heads]
    upstream = torch.randn(num_rows, NUM_HEADS, HEAD_SIZE, generator=generator).to(dtype)
    shared = sharing if case.shares_prompts else None
    layout = PackedLayout.of(np.array(LENGTHS), device, dtype, shared)
    if case.reach.sinks is not None:
        drawn.append(case.reach.sinks.to(dtype))
    q, k, v, *sinks = inputs = [x.to(device).requires_grad_() for x in drawn]
    output = attend(q, k, v, layout, None, Reach(case.reach.window, *sinks))
    gradients = torch.autograd.grad(output, inputs, upstream.to(device))
    exact_inputs = [x.double().requires_grad_() for x in drawn]
    row_of_token, token_of_row = map(torch.from_numpy, (sharing.row_of_token, sharing.token_of_row))
    whole_q, whole_k, whole_v = (x[row_of_token] for x in exact_inputs[:3])
    exact_reach = Reach(case.reach.window, *exact_inputs[3:])
    exact = _exact(whole_q, whole_k, whole_v, exact_reach)[token_of_row]
    exact_gradients = torch.autograd.grad(exact, exact_inputs, upstream.double())
    errors = [relative_error(*pair) for pair in zip(gradients, exact_gradients, strict=True)]
    return AttentionError(layout.kernel, relative_error(output, exact), max(errors))


def _sharing(num_shared: int) -> PrefixSharing:
    """Return the rows of the sequences where the last three begin with the same tokens."""
    starts, owner = np.cumsum(LENGTHS) - LENGTHS, np.arange(sum(LENGTHS))
    for start in starts[-2:]:
        owner[start : start + num_shared] = np.arange(starts[-3], starts[-3] + num_shared)
    return PrefixSharing.of_owners(owner)


def _exact(q: Tensor, k: Tensor, v: Tensor, reach: Reach) -> Tensor:
    """Return causal attention within each sequence: q `[T, H, d]`, k and v `[T, G, d]` -> `[T, H, d]`."""
    sequences = []
    for queries, keys, values in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        keys, values = (x.repeat_interleave(NUM_HEADS // NUM_KEY_HEADS, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / HEAD_SIZE**0.5
        unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        if reach.window is not None:
            unseen |= ~unseen.new_ones(unseen.shape).triu(1 - reach.window)
        scores = scores.masked_fill(unseen, -torch.inf)
        if reach.sinks is not None:
            of_queries = reach.sinks[:, None, None].expand(-1, len(queries), -1)
            scores = torch.cat((scores, of_queries), dim=-1)
        weights = scores.softmax(-1)[..., : len(keys)]
        sequences.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(sequences)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest difference from a result in float64, relative to its largest value."""
    return float((found.detach().cpu().double() - exact.detach()).abs().max() / exact.detach().abs().max())
