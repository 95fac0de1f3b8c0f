"""Drawing tokens: known values, top-p and top-k, the distribution, and the counter-based random numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hflow.engines.embedded.sampling import SamplingRows, _restrict, draw
from hflow.engines.interface import SamplingParams
from hflow.models.seeds import seed_words, uniforms

CPU = torch.device("cpu")
PROBABILITIES = [0.4, 0.05, 0.3, 0.25]


def drawn(params: SamplingParams, num: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    """`num` draws from PROBABILITIES with seeds 0, 1, ..."""
    seeded = [replace(params, seed=i) for i in range(num)]
    logits = torch.tensor(PROBABILITIES).log().expand(num, 4)
    tokens, logprobs = draw(logits, SamplingRows.of(seeded, 4, CPU), np.zeros(num, np.int64)).values
    return tokens.long(), logprobs


def frequencies(tokens: torch.Tensor) -> list[float]:
    return (torch.bincount(tokens, minlength=4) / len(tokens)).tolist()


def test_frequencies_follow_the_distribution() -> None:
    tokens, logprobs = drawn(SamplingParams())
    assert frequencies(tokens) == pytest.approx(PROBABILITIES, abs=0.025)
    torch.testing.assert_close(logprobs.float(), torch.tensor(PROBABILITIES).log()[tokens])


def test_temperature_divides_the_logits() -> None:
    tokens, logprobs = drawn(SamplingParams(temperature=0.5))
    squared = torch.tensor(PROBABILITIES) ** 2
    expected = squared / squared.sum()
    assert frequencies(tokens) == pytest.approx(expected.tolist(), abs=0.025)
    torch.testing.assert_close(logprobs.float(), expected.log()[tokens])


def test_temperature_0_is_greedy_with_log_probs_at_1() -> None:
    tokens, logprobs = drawn(SamplingParams(temperature=0.0), 8)
    assert set(tokens.tolist()) == {0}
    assert logprobs.tolist() == pytest.approx([np.log(0.4)] * 8)


@pytest.mark.parametrize(
    ("params", "support"),
    [
        (SamplingParams(top_k=1), [0]),
        (SamplingParams(top_k=2), [0, 2]),
        (SamplingParams(top_p=0.39), [0]),
        (SamplingParams(top_p=5e-324), [0]),
        (SamplingParams(top_p=1e-20, top_k=3), [0]),
        (SamplingParams(top_p=0.41), [0, 2]),
        (SamplingParams(top_p=0.8), [0, 2, 3]),
        (SamplingParams(top_p=0.5, top_k=2), [0]),
        (SamplingParams(top_p=0.6, top_k=2), [0, 2]),
        (SamplingParams(top_k=9), [0, 1, 2, 3]),
        (SamplingParams(min_p=0.1), [0, 1, 2, 3]),
        (SamplingParams(min_p=0.13), [0, 2, 3]),
        (SamplingParams(min_p=1.0), [0]),
        (SamplingParams(min_p=0.13, top_k=2), [0, 2]),
        (SamplingParams(min_p=0.7, top_p=0.57), [0]),
        (SamplingParams(min_p=0.7, top_p=0.58), [0, 2]),
    ],
)
def test_top_k_and_top_p_restrict_the_support(params: SamplingParams, support: list[int]) -> None:
    tokens, logprobs = drawn(params)
    assert sorted(set(tokens.tolist())) == support
    kept = torch.tensor(PROBABILITIES)[support]
    expected = torch.zeros(4).index_put((torch.tensor(support),), kept / kept.sum())
    assert frequencies(tokens) == pytest.approx(expected.tolist(), abs=0.03)
    torch.testing.assert_close(logprobs.float(), expected.log()[tokens])


@given(
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=40),
    num_ranked=st.sampled_from([1, 3, 10]),
    limits=st.lists(st.tuples(st.integers(0, 41), st.integers(1, 40), st.booleans()), min_size=1, max_size=4),
)
def test_the_sampling_mask_are_the_first_of_all_sorted_tokens(counts, num_ranked, limits) -> None:
    """Of equally likely ones those with the lowest ids, however many tokens were ranked first."""
    probabilities = np.array(counts) / sum(counts)
    order = np.argsort(-probabilities, kind="stable")
    params, wanted = [], []
    for top_k, num_kept, is_free in limits:
        left = probabilities[order][: top_k or None]
        num = min(num_kept, len(left))
        middle_of_last = (left[:num].sum() - left[num - 1] / 2) / left.sum()
        params.append(
            SamplingParams() if is_free else SamplingParams(top_k=top_k, top_p=float(middle_of_last))
        )
        wanted.append(sorted(order if is_free else order[:num]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hflow.engines.embedded.sampling.NUM_RANKED", num_ranked)
        rows = SamplingRows.of(params, len(counts), CPU)
    logprobs = torch.tensor(np.log(probabilities), dtype=torch.float32).expand(len(params), -1)
    kept, is_right = _restrict(logprobs, rows)
    if is_right is not None:
        for row, right, expected in zip(kept, is_right, wanted, strict=True):
            assert not right or row.nonzero()[:, 0].tolist() == expected
        kept, is_right = _restrict(logprobs, replace(rows, num_ranked=len(counts)))
    assert is_right is None
    assert [row.nonzero()[:, 0].tolist() for row in kept] == wanted
    torch.testing.assert_close(kept, logprobs.exp() * (kept > 0))


def test_a_nucleus_beyond_the_ranked_tokens_is_drawn_from_the_whole_vocabulary(monkeypatch) -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)) / 3
    params = [SamplingParams(0.7, top_p=0.9, seed=i) for i in range(40)]
    positions = np.arange(40)
    wanted = draw(logits, SamplingRows.of(params, 50, CPU), positions).values
    monkeypatch.setattr("hflow.engines.embedded.sampling.NUM_RANKED", 3)
    rows = SamplingRows.of(params, 50, CPU)
    _, is_right = _restrict((logits / 0.7).log_softmax(-1), rows)
    assert not is_right.any()
    torch.testing.assert_close(draw(logits, rows, positions).values, wanted)


def test_rows_with_different_parameters_are_independent() -> None:
    params = [
        SamplingParams(seed=5),
        SamplingParams(0.0, seed=5),
        SamplingParams(top_k=1, seed=5),
        SamplingParams(2.0),
    ]
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    positions = np.array([3, 9, 1, 4])
    together = draw(logits, SamplingRows.of(params, 50, CPU), positions).values
    for i in range(4):
        rows = SamplingRows.of(params[i : i + 1], 50, CPU)
        alone = draw(logits[i : i + 1], rows, positions[i : i + 1]).values
        torch.testing.assert_close(alone[:, 0], together[:, i])


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((2000, 5), float("-inf"))
    logits[:, 1], logits[:, 3] = 0.0, -20.0
    rows = SamplingRows.of([SamplingParams(seed=i) for i in range(2000)], 5, CPU)
    assert set(draw(logits, rows, np.zeros(2000, np.int64)).values[0].tolist()) <= {1.0, 3.0}


def test_numbers_are_those_of_splitmix64() -> None:
    """Seed word 0 at position i gives SplitMix64's i-th output for state 0."""
    words = np.zeros(3, np.uint64)
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    expected = [(output >> 12) * 2.0**-52 for output in outputs]
    assert uniforms(words, np.array([1, 2, 3])).tolist() == expected


def test_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    over_positions = uniforms(np.repeat(seed_words([17]), 20_000), np.arange(20_000))
    over_seeds = uniforms(seed_words(range(20_000)), np.full(20_000, 5))
    for numbers in (over_positions, over_seeds):
        assert 0 <= numbers.min() < 0.001
        assert 0.999 < numbers.max() < 1
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert counts.tolist() == pytest.approx([1000] * 20, abs=130)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_seeds_of_any_size_and_sign_work() -> None:
    words = seed_words([-1, 2**64 - 1, 0, 2**70])
    assert words[0] == words[1]
    assert words[2] == words[3]
