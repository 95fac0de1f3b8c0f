"""Micro-batches keep to the budget, lose no row and separate no group."""

import hypothesis.strategies as st
from hypothesis import given

from hflow.training.loop.microbatches import pack_sequences

LENGTHS = st.lists(st.integers(1, 50), max_size=60)


def test_first_fit_decreasing():
    # By size: 6 -> A, 5 -> B, 4 -> A, 3 -> B, 2 -> B, 1 -> C.
    assert pack_sequences([3, 6, 1, 5, 2, 4], budget=10) == [[0, 3, 4], [1, 5], [2]]


def test_all_in_one_when_they_fit():
    assert pack_sequences([3, 2, 4], budget=9) == [[0, 1, 2]]


def test_a_sequence_longer_than_the_budget_has_its_own_micro_batch():
    assert pack_sequences([12, 3, 15, 4], budget=10) == [[0], [1, 3], [2]]


def test_groups_stay_together():
    assert pack_sequences([4, 4, 4, 4], budget=9, keep_together=[7, 5, 7, 5]) == [[0, 2], [1, 3]]


def test_a_group_longer_than_the_budget_has_its_own_micro_batch():
    assert pack_sequences([6, 6, 2], budget=10, keep_together=[0, 0, 1]) == [[0, 1], [2]]


def test_no_sequences():
    assert pack_sequences([], budget=10) == []
    assert pack_sequences([], budget=10, keep_together=[]) == []


@given(lengths=LENGTHS, budget=st.integers(1, 80), num_groups=st.integers(1, 8))
def test_every_row_once_within_the_budget(lengths, budget, num_groups):
    groups = [i % num_groups for i in range(len(lengths))]
    for labels in (None, groups):
        bins = pack_sequences(lengths, budget, labels)
        assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
        for rows in bins:
            units = set(rows) if labels is None else {groups[row] for row in rows}
            assert sum(lengths[row] for row in rows) <= budget or len(units) == 1
        if labels is not None:
            owners = [
                {i for i, rows in enumerate(bins) for row in rows if groups[row] == g} for g in set(groups)
            ]
            assert all(len(owner) == 1 for owner in owners)


@given(lengths=LENGTHS, budget=st.integers(50, 100))
def test_no_two_micro_batches_would_fit_into_one(lengths, budget):
    sums = sorted(sum(lengths[row] for row in rows) for rows in pack_sequences(lengths, budget))
    assert len(sums) < 2 or sums[0] + sums[1] > budget
