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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hflow.data.batches.device_copy import to_device
from hflow.engines.interface import SamplingParams
from hflow.models.attention_kernels import triton_kernels
from hflow.models.seeds import seed_words, uniforms
from hflow.types.sampling_mask import SAMPLING_MASK, pack_ids

NUM_RANKED = 1024
"""Tokens that are ranked for `top_p` before the whole vocabulary is."""
UNITS_OF_ONE = 2.0**60
"""What probabilities are multiplied by to become integers. Their sum is 1, so it fits into int64."""


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of S sequences as columns."""

    words: np.ndarray[tuple[int], np.dtype[np.uint64]]
    is_recorded: npt.NDArray[np.bool_]
    """`[S]`: whether the tokens that are left are recorded, where some are left out."""
    temperature: Tensor | None
    """float32 `[S, 1]`, 1 for greedy sequences; None if it is 1 for all."""
    greedy: Tensor | None
    """bool `[S]`; None if no sequence is greedy."""
    top_k: Tensor | None
    """int64 `[S, 1]`; None, as `top_p` and `min_p`, if no sequence restricts its tokens."""
    top_p: Tensor | None
    """float32 `[S, 1]`."""
    min_p: Tensor | None
    """float32 `[S, 1]`."""
    num_ranked: int = 0
    """How many of the likeliest tokens are ranked before all are; see `_restrict`."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingRows:
        """Make columns of parameters."""
        greedy = [p.temperature == 0 for p in params]
        column = [[p.temperature or 1.0] for p in params]
        is_scaled = any(temperature != 1 for (temperature,) in column)
        free = (vocab_size, 1.0, 0.0)
        limits = [(min(p.top_k or vocab_size, vocab_size), p.top_p, p.min_p) for p in params]
        limits = [free if is_greedy else limit for limit, is_greedy in zip(limits, greedy, strict=True)]
        is_restricted = np.array([limit != free for limit in limits])

        def on_device(values: list[Any]) -> Tensor:
            return to_device(torch.tensor(values), device)

        top_k, top_p, min_p = (
            on_device([[value] for value in values]) if is_restricted.any() else None
            for values in zip(*limits, strict=True)
        )
        return cls(
            words=seed_words([p.seed for p in params]),
            is_recorded=is_restricted & np.array([SAMPLING_MASK in p.record for p in params]),
            temperature=on_device(column) if is_scaled else None,
            greedy=on_device(greedy) if any(greedy) else None,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            num_ranked=_num_ranked(params, vocab_size) if is_restricted.any() else 0,
        )

    def take(self, rows: npt.NDArray[np.int64]) -> SamplingRows:
        """Return the columns of some sequences, in this order."""
        taken = replace(self, words=self.words[rows], is_recorded=self.is_recorded[rows])
        columns = (self.temperature, self.greedy, self.top_k, self.top_p, self.min_p)
        if all(column is None for column in columns):
            return taken
        device = next(column.device for column in columns if column is not None)
        index = to_device(torch.from_numpy(rows), device)
        temperature, greedy, top_k, top_p, min_p = (
            None if column is None else column.index_select(0, index) for column in columns
        )
        return replace(taken, temperature=temperature, greedy=greedy, top_k=top_k, top_p=top_p, min_p=min_p)


class Drawn(NamedTuple):
    """The tokens of a step, on the host."""

    values: Tensor
    """float64 `[2, S]`: token ids, and their log-probs under `log_softmax(logits / temperature)` over the
    tokens that the limits leave (temperature 1 and all tokens for greedy sequences)."""
    kept: Sequence[bytes]
    """The entry of `sampling_mask` of each sequence; empty where it is not recorded."""


def draw(
    logits: Tensor,
    rows: SamplingRows,
    positions: np.ndarray[tuple[int], np.dtype[np.int64]],
    forced: Tensor | None = None,
) -> Drawn:
    """Draw a token for each row of logits `[S, V]`, at `positions`, int64 `[S]`, in their sequences.

    `forced`, int64 `[S]`, are tokens to use in place of drawn ones; None to draw.
    """
    if forced is None and rows.top_k is None and (kernels := triton_kernels(logits.device)) is not None:
        uniform = to_device(torch.from_numpy(uniforms(rows.words, positions)), logits.device)
        values = kernels.draw_tokens(logits, uniform, rows.temperature, rows.greedy)
        return Drawn(values.cpu(), [b""] * len(rows.words))  # waits: once per decode step
    logits = logits.float() if rows.temperature is None else logits.float() / rows.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    drawn = _draw_ranked(logprobs, rows, positions, forced)
    if drawn is None:
        drawn = _draw_ranked(logprobs, replace(rows, num_ranked=logprobs.shape[1]), positions, forced)
    assert drawn is not None, "all tokens are ranked"
    return drawn


def _draw_ranked(
    logprobs: Tensor,
    rows: SamplingRows,
    positions: np.ndarray[tuple[int], np.dtype[np.int64]],
    forced: Tensor | None,
) -> Drawn | None:
    """Draw from what `_restrict` leaves; return None where that is not right."""
    probabilities, is_right = _restrict(logprobs, rows)
    tokens = _sample(probabilities, logprobs, rows, positions) if forced is None else forced
    picked = logprobs.gather(1, tokens[:, None])
    if rows.top_k is not None:
        picked = picked - probabilities.sum(-1, keepdim=True).log().where(_is_restricted(rows, logprobs), 0)
    columns = [tokens, picked[:, 0]]
    if is_right is not None:
        columns.append(is_right)
    if rows.is_recorded.any():  # host: numpy
        columns.append((probabilities > 0).sum(-1))
    values = torch.stack([column.double() for column in columns]).cpu()  # waits: once per decode step
    if is_right is not None and not values[2].all():  # host: copied above
        return None
    kept = [b""] * len(rows.words)
    if rows.is_recorded.any():  # host: numpy
        recorded = np.flatnonzero(rows.is_recorded)
        counts = values[-1].numpy().astype(np.int64)[recorded]  # host: copied above
        likeliest = probabilities.index_select(0, to_device(torch.from_numpy(recorded), logprobs.device))
        # The second wait of the step, as the size of the copy depends on what is left.
        ids = likeliest.topk(int(counts.max())).indices.int().cpu().numpy()  # waits: once per decode step
        for row, of_row, count in zip(recorded, ids, counts, strict=True):
            kept[row] = pack_ids(of_row[:count]) if count else b""
    return Drawn(values[:2], kept)


def _sample(
    probabilities: Tensor,
    logprobs: Tensor,
    rows: SamplingRows,
    positions: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> Tensor:
    """Return a token of each sequence, int64 `[S]`."""
    uniform = to_device(torch.from_numpy(uniforms(rows.words, positions)), logprobs.device)
    tokens = _inverse_cdf(probabilities, uniform)
    return tokens if rows.greedy is None else torch.where(rows.greedy, logprobs.argmax(-1), tokens)


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
    """Return probabilities `[S, V]`, 0 outside the tokens that the limits leave.

    The second result, bool `[S]`, says for which sequences they are right; None: for all.

    `min_p` leaves the tokens with at least this part of the likeliest one's probability (Nguyen et al.,
    "Turning up the heat: min-p sampling", 2024), `top_k` the likeliest of these, and `top_p` the nucleus of
    the rest: the smallest set of likeliest tokens with at least `top_p` of its probability (Holtzman et al.,
    "The curious case of neural text degeneration", 2020).

    A whole vocabulary takes long to sort, so the `num_ranked` likeliest tokens are ranked. They have the
    nucleus unless the distribution is nearly flat. The host sees that with the tokens, and ranks all then.
    """
    probabilities = logprobs.exp()
    if rows.top_k is None or rows.top_p is None or rows.min_p is None:
        return probabilities, None
    vocab_size = probabilities.shape[1]
    least_wanted = rows.min_p * probabilities.amax(-1, keepdim=True)
    probabilities = probabilities.where(probabilities >= least_wanted, 0)
    is_whole = (rows.top_k >= vocab_size) & (rows.top_p >= 1)
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
    restricted = probabilities.where(is_whole | is_kept, 0)
    return restricted, (has_nucleus | is_whole)[:, 0] if rows.num_ranked < vocab_size else None


def _is_restricted(rows: SamplingRows, logprobs: Tensor) -> Tensor:
    """Return whether tokens of each sequence are left out: bool `[S, 1]`."""
    assert rows.top_k is not None
    assert rows.top_p is not None
    assert rows.min_p is not None
    return (rows.top_k < logprobs.shape[1]) | (rows.top_p < 1) | (rows.min_p > 0)


def _num_ranked(params: Sequence[SamplingParams], vocab_size: int) -> int:
    """Return the number of tokens to rank first: at least each `top_k` that leaves tokens out."""
    return min(vocab_size, max(NUM_RANKED, *(p.top_k or 0 for p in params)))
