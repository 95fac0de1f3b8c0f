"""pass@k: known answers, and the definition by enumeration."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hflow.algo.pass_at_k import pass_at_k


def test_known_answers() -> None:
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)  # 1 - C(3, 2) / C(5, 2) = 1 - 3 / 10
    assert pass_at_k(200, 0, 100) == 0.0
    assert pass_at_k(3, 2, 2) == 1.0, "fewer wrong samples than k"


@given(st.integers(1, 8), st.data())
def test_it_is_the_share_of_draws_with_a_correct_sample(num_samples: int, data: st.DataObject) -> None:
    num_correct = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    draws = list(combinations(range(num_samples), k))
    share = sum(min(draw) < num_correct for draw in draws) / len(draws)
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(share)


@pytest.mark.parametrize(("num_samples", "num_correct", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0)])
def test_what_is_not_defined_is_refused(num_samples: int, num_correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(num_samples, num_correct, k)
