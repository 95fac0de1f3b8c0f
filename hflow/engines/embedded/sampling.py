"""Draws one token for each sequence, in one batch.

**Inverse-CDF sampling.** With the uniform number u of (seed, position), the drawn token is the first whose
cumulative probability exceeds u. One number per token is enough for any vocabulary, and nearly equal
distributions nearly always draw the same token.

**Random numbers.** Number i of a seed is a hash of (seed, i) (`models/seeds.py`). A generator with a state
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

from hflow.data.batches.device_copy import to_device
from hflow.engines.interface import SamplingParams
from hflow.models.seeds import seed_words, uniforms

NUM_RANKED = 1024
"""Tokens that are ranked for `top_p` before the whole vocabulary is."""
UNITS_OF_ONE = 2.0**60
"""What probabilities are multiplied by to become integers. Their sum is 1, so it fits into int64."""


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
    num_ranked: int = 0
    """How many of the likeliest tokens are ranked before all are; see `_restrict`."""

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
            num_ranked=_num_ranked(params, vocab_size) if restricted else 0,
        )

    def take(self, rows: npt.NDArray[np.int64]) -> SamplingRows:
        """Return the columns of some sequences, in this order."""
        columns = (self.temperature, self.greedy, self.top_k, self.top_p)
        if all(column is None for column in columns):
            return replace(self, words=self.words[rows])
        device = next(column.device for column in columns if column is not None)
        index = to_device(torch.from_numpy(rows), device)
        temperature, greedy, top_k, top_p = (
            None if column is None else column.index_select(0, index) for column in columns
        )
        words = self.words[rows]
        return replace(self, words=words, temperature=temperature, greedy=greedy, top_k=top_k, top_p=top_p)


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
        float64 `[2, S]` on the host: token ids, and their log-probs under `log_softmax(logits / temperature)`
        over the whole vocabulary (temperature 1 for greedy sequences).
    """
    logits = logits.float() if rows.temperature is None else logits.float() / rows.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens, has_nucleus = (forced, None) if forced is not None else _sample(logprobs, rows, positions)
    if has_nucleus is None:
        return _copy_to_host(logprobs, tokens)
    drawn = _copy_to_host(logprobs, tokens, has_nucleus)
    if drawn[2].all():  # host: copied above
        return drawn[:2]
    ranking_all = replace(rows, num_ranked=logprobs.shape[1])
    tokens, _ = _sample(logprobs, ranking_all, positions)
    return _copy_to_host(logprobs, tokens)


def _copy_to_host(logprobs: Tensor, tokens: Tensor, *others: Tensor) -> Tensor:
    """Return rows of values of each sequence, float64: tokens, their log-probs, and others."""
    rows = [tokens, logprobs.gather(1, tokens[:, None])[:, 0], *others]
    return torch.stack([row.double() for row in rows]).cpu()  # waits: once per decode step


def _sample(
    logprobs: Tensor, rows: SamplingRows, positions: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> tuple[Tensor, Tensor | None]:
    """Return a token of each sequence, and whether it is right, as `_restrict` does."""
    uniform = to_device(torch.from_numpy(uniforms(rows.words, positions)), logprobs.device)
    probabilities, has_nucleus = _restrict(logprobs, rows)
    tokens = _inverse_cdf(probabilities, uniform)
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy, logprobs.argmax(-1), tokens)
    return tokens, has_nucleus


def _inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds `uniform` times the total, int64 `[S]`."""
    cumulative = _units(probabilities).cumsum(-1)
    thresholds = (uniform[:, None] * cumulative[:, -1:]).long()
    tokens = torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
    return tokens.clamp_(max=probabilities.shape[1] - 1)  # beyond the end only where logits are NaN


def _units(probabilities: Tensor) -> Tensor:
    """Return float32 probabilities in `UNITS_OF_ONE`, int64.

    A GPU makes running sums in no fixed order, which changes sums of integers by nothing.
    """
    return (probabilities * UNITS_OF_ONE).long()


def _restrict(logprobs: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor | None]:
    """Return probabilities `[S, V]`, 0 outside the `top_k` likeliest tokens and, of these, the nucleus.

    The second result, bool `[S]`, says for which sequences they are right; None: for all.

    The nucleus is the smallest set of likeliest tokens with at least `top_p` of the probability that `top_k`
    leaves (Holtzman et al., "The curious case of neural text degeneration", 2020).

    A whole vocabulary takes long to sort, so the `num_ranked` likeliest tokens are ranked. They have the
    nucleus unless the distribution is nearly flat. The host sees that with the tokens, and ranks all then.
    """
    probabilities = logprobs.exp()
    if rows.top_k is None or rows.top_p is None:
        return probabilities, None
    vocab_size = probabilities.shape[1]
    is_free = (rows.top_k >= vocab_size) & (rows.top_p >= 1)
    ranked = probabilities.topk(rows.num_ranked, dim=-1).values
    has_whole_top_k = rows.top_k <= rows.num_ranked
    within = torch.arange(rows.num_ranked, device=ranked.device) < rows.top_k
    ranked = ranked.where(within, 0)
    total = torch.where(has_whole_top_k, ranked.sum(-1, keepdim=True), probabilities.sum(-1, keepdim=True))
    wanted = rows.top_p * total
    has_nucleus = has_whole_top_k | (ranked.sum(-1, keepdim=True) >= wanted)
    units = _units(ranked)
    kept = within & (units.cumsum(-1) - units < _units(wanted))
    num_kept = kept.sum(-1, keepdim=True).clamp_(min=1)  # a tiny `top_p` is 0 units
    least = ranked.gather(1, num_kept - 1)
    # Of equally likely tokens those with the lowest ids are kept, as if all tokens had been sorted.
    is_least = probabilities == least
    num_least = num_kept - (ranked > least).sum(-1, keepdim=True)
    is_kept = (probabilities > least) | (is_least & (is_least.cumsum(-1) <= num_least))
    restricted = probabilities.where(is_free | is_kept, 0)
    return restricted, (has_nucleus | is_free)[:, 0] if rows.num_ranked < vocab_size else None


def _num_ranked(params: Sequence[SamplingParams], vocab_size: int) -> int:
    """Return the number of tokens to rank first: at least each `top_k` that leaves tokens out."""
    return min(vocab_size, max(NUM_RANKED, *(p.top_k or 0 for p in params)))
