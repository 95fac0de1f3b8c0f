"""Draws one token for each sequence, in one batch.

**Inverse-CDF sampling.** With the uniform number u of (seed, position), the drawn token is the first whose
cumulative probability exceeds u. One number per token is enough for any vocabulary, and nearly equal
distributions nearly always draw the same token.

**Random numbers.** Number i of a seed is a hash of (seed, i) (`common/seeds.py`). A generator with a state
would make a sequence's draws depend on the order in which sequences are served.

Axes: S sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hflow.backends.common.seeds import seed_words, uniforms
from hflow.backends.interface import SamplingParams
from hflow.data.device_copy import to_device


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of S sequences as columns."""

    words: np.ndarray[tuple[int], np.dtype[np.uint64]]
    temperature: Tensor | None
    """float32 `[S, 1]`, 1 for greedy sequences; None if it is 1 for all."""
    greedy: Tensor | None
    """bool `[S]`; None if no sequence is greedy."""
    top_k: Tensor | None
    """int64 `[S, 1]`; None, as `top_p`, if no sequence restricts its tokens."""
    top_p: Tensor | None
    """float32 `[S, 1]`."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingRows:
        """Make columns of parameters."""
        greedy = [p.temperature == 0 for p in params]
        restricted = any(p.top_k or p.top_p < 1 for p in params)
        column = [[p.temperature or 1.0] for p in params]
        is_scaled = any(temperature != 1 for (temperature,) in column)

        def on_device(values: list[Any]) -> Tensor:
            return to_device(torch.tensor(values), device)

        return cls(
            words=seed_words([p.seed for p in params]),
            temperature=on_device(column) if is_scaled else None,
            greedy=on_device(greedy) if any(greedy) else None,
            top_k=on_device([[p.top_k or vocab_size] for p in params]) if restricted else None,
            top_p=on_device([[p.top_p] for p in params]) if restricted else None,
        )

    def take(self, rows: npt.NDArray[np.int64]) -> SamplingRows:
        """Return the columns of some sequences, in this order."""
        columns = (self.temperature, self.greedy, self.top_k, self.top_p)
        if all(column is None for column in columns):
            return replace(self, words=self.words[rows])
        device = next(column.device for column in columns if column is not None)
        index = to_device(torch.from_numpy(rows), device)
        taken = (None if c is None else c.index_select(0, index) for c in columns)
        return SamplingRows(self.words[rows], *taken)


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
        positions: int64 `[S]`, index of the token to draw in its sequence.
        forced: int64 `[S]`, tokens to use in place of drawn ones; None to draw.

    Returns:
        float64 `[2, S]`: token ids, and their log-probs under `log_softmax(logits / temperature)` over the
        whole vocabulary (temperature 1 for greedy sequences).
    """
    logits = logits.float() if rows.temperature is None else logits.float() / rows.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = _sample(logprobs, rows, positions) if forced is None else forced
    drawn = logprobs.gather(1, tokens[:, None])[:, 0]
    return torch.stack((tokens.double(), drawn.double()))


def _sample(
    logprobs: Tensor, rows: SamplingRows, positions: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> Tensor:
    uniform = to_device(torch.from_numpy(uniforms(rows.words, positions)), logprobs.device)
    tokens = _inverse_cdf(_restrict(logprobs, rows), uniform)
    return tokens if rows.greedy is None else torch.where(rows.greedy, logprobs.argmax(-1), tokens)


def _inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds `uniform` times the total, int64 `[S]`."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    thresholds = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
    return tokens.clamp_(max=probabilities.shape[1] - 1)  # beyond the end only where logits are NaN


def _restrict(logprobs: Tensor, rows: SamplingRows) -> Tensor:
    """Return probabilities `[S, V]`, 0 outside the `top_k` likeliest tokens and, of these, the nucleus.

    The nucleus is the smallest set of likeliest tokens with at least `top_p` of the probability that `top_k`
    leaves (Holtzman et al., "The curious case of neural text degeneration", 2020).
    """
    probabilities = logprobs.exp()
    if rows.top_k is None or rows.top_p is None:
        return probabilities
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranked = ranked.masked_fill(torch.arange(ranked.shape[1], device=ranked.device) >= rows.top_k, 0)
    before = ranked.cumsum(-1) - ranked
    ranked = ranked.masked_fill(before >= rows.top_p * ranked.sum(-1, keepdim=True), 0)
    return torch.zeros_like(ranked).scatter(1, order, ranked)
