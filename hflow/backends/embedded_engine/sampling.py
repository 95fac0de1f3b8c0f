"""Draws one token for each sequence, in one batch.

**Inverse-CDF sampling.** With the uniform number u of (seed, position), the drawn token is the first whose
cumulative probability exceeds u. One number per token is enough for any vocabulary, and nearly equal
distributions nearly always draw the same token.

**Random numbers.** Number i of a seed is a hash of (seed, i): the finalizer of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). A generator with a state would make a
sequence's draws depend on the order in which sequences are served.

Axes: S sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hflow.backends.interface import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of S sequences as columns."""

    words: np.ndarray[tuple[int], np.dtype[np.uint64]]
    temperature: Tensor
    """float32 `[S, 1]`, 1 for greedy sequences."""
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
        positions: int64 `[S]`, index of the token to draw in its sequence.
        forced: int64 `[S]`, tokens to use in place of drawn ones; None to draw.

    Returns:
        float64 `[2, S]`: token ids, and their log-probs under `log_softmax(logits / temperature)` over the
        whole vocabulary (temperature 1 for greedy sequences).
    """
    logprobs = torch.log_softmax(logits.float() / rows.temperature, dim=-1)
    tokens = _sample(logprobs, rows, positions) if forced is None else forced
    drawn = logprobs.gather(1, tokens[:, None])[:, 0]
    return torch.stack((tokens.double(), drawn.double()))


def _sample(
    logprobs: Tensor, rows: SamplingRows, positions: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> Tensor:
    uniform = torch.from_numpy(uniforms(rows.words, positions)).to(logprobs.device, non_blocking=True)
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


def seed_words(seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Hash seeds of any size and sign to 64-bit words, so that neighbouring seeds have unrelated words."""
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64)
    return _mix(words + _GOLDEN)


def uniforms(words: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed word, position), a multiple of 2^-52."""
    mixed = _mix(words + positions.astype(np.uint64) * _GOLDEN)
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed
