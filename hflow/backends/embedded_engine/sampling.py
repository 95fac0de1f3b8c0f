"""Drawing one token for each sequence, all at once.

Inverse-CDF sampling: with the uniform number u of (seed, position), the token drawn is the
first whose cumulative probability exceeds u. One number a token suffices whatever the
vocabulary, and nearly equal distributions draw nearly always the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hflow.backends.base import SamplingParams
from hflow.backends.embedded_engine.uniform import seed_words, uniforms


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of S sequences as columns."""

    words: np.ndarray[tuple[int], np.dtype[np.uint64]]
    temperature: Tensor
    """float32 `[S, 1]`, 1 where greedy."""
    greedy: Tensor | None
    """bool `[S]`, None where no sequence is greedy."""
    top_k: Tensor | None
    """int64 `[S, 1]`; None (as `top_p`) where no sequence restricts its support."""
    top_p: Tensor | None
    """float32 `[S, 1]`."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingRows:
        """Columns of `params`."""
        greedy = [p.temperature == 0 for p in params]
        restricted = any(p.top_k or p.top_p < 1 for p in params)
        column = [[p.temperature or 1.0] for p in params]
        return cls(
            words=seed_words([p.seed for p in params]),
            temperature=torch.tensor(column, dtype=torch.float32, device=device),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k=torch.tensor([[p.top_k or vocab_size] for p in params], device=device)
            if restricted
            else None,
            top_p=torch.tensor([[p.top_p] for p in params], device=device) if restricted else None,
        )


def draw(
    logits: Tensor,
    rows: SamplingRows,
    positions: np.ndarray[tuple[int], np.dtype[np.int64]],
    forced: Tensor | None = None,
) -> Tensor:
    """Draw a token for each row.

    Args:
        logits: `[S, V]`, any float dtype.
        rows: parameters of the S sequences.
        positions: int64 `[S]`, index in its sequence of the token to draw.
        forced: int64 `[S]`, the tokens to take; None: they are drawn.

    Returns:
        float64 `[2, S]`: token ids, and their log-probs under
        `log_softmax(logits / temperature)` over the whole vocabulary (temperature 1 where greedy).
    """
    logprobs = torch.log_softmax(logits.float() / rows.temperature, dim=-1)
    tokens = _drawn(logprobs, rows, positions) if forced is None else forced
    drawn = logprobs.gather(1, tokens[:, None])[:, 0]
    return torch.stack((tokens.double(), drawn.double()))


def _drawn(
    logprobs: Tensor, rows: SamplingRows, positions: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> Tensor:
    uniform = torch.from_numpy(uniforms(rows.words, positions)).to(logprobs.device, non_blocking=True)
    tokens = _inverse_cdf(_support(logprobs, rows), uniform)
    return tokens if rows.greedy is None else torch.where(rows.greedy, logprobs.argmax(-1), tokens)


def _inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """First token whose cumulative probability exceeds `uniform` times the total, int64 `[S]`."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    thresholds = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
    return tokens.clamp_(max=probabilities.shape[1] - 1)  # beyond the end only where logits are NaN


def _support(logprobs: Tensor, rows: SamplingRows) -> Tensor:
    """Probabilities `[S, V]`, 0 outside the `top_k` likeliest and, among these, the nucleus.

    The nucleus is the smallest set of likeliest tokens with at least `top_p` of the mass that
    `top_k` leaves (Holtzman et al., "The curious case of neural text degeneration", 2020).
    """
    probabilities = logprobs.exp()
    if rows.top_k is None or rows.top_p is None:
        return probabilities
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranked = ranked.masked_fill(torch.arange(ranked.shape[1], device=ranked.device) >= rows.top_k, 0)
    before = ranked.cumsum(-1) - ranked
    ranked = ranked.masked_fill(before >= rows.top_p * ranked.sum(-1, keepdim=True), 0)
    return torch.zeros_like(ranked).scatter(1, order, ranked)
