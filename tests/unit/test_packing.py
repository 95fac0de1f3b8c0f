"""Micro-batches keep to the budget, lose no row and separate no group."""

import hypothesis.strategies as st
import numpy as np
import torch
import torch_kit as kit
from hypothesis import given

from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.shared_prefix import share_prefixes
from hflow.training.loop.inputs import prepare_batch, target_positions
from hflow.training.loop.microbatches import MicrobatchSplitter, pack_sequences
from hflow.types import Unit

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


@st.composite
def prepared_batches(draw):
    """Groups of answers to a prompt, some tokens of which are not learned, in any order."""
    groups = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=4))
    rows = []
    for group, (prompt, size) in enumerate(groups):
        for _ in range(size):
            answer = draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
            learned = draw(st.lists(st.booleans(), min_size=len(answer), max_size=len(answer)))
            rows.append((group, [9] * prompt + answer, [False] * prompt + learned))
    rows = draw(st.permutations(rows))
    columns = {
        "input_ids": Column(Unit.TOKEN, np.concatenate([ids for _, ids, _ in rows])),
        "loss_mask": Column(Unit.TOKEN, np.concatenate([learned for *_, learned in rows])),
    }
    number, labels = np.arange(len(rows)), np.array([group for group, *_ in rows])
    return prepare_batch(Batch(number, labels, np.array([len(ids) for _, ids, _ in rows]), columns), "lm")


def num_computed(batch):
    sharing = share_prefixes(batch)
    return batch.num_tokens if sharing is None else len(sharing.token_of_row)


@given(batch=prepared_batches(), budget=st.integers(1, 60))
def test_no_micro_batch_computes_more_than_the_budget(batch, budget):
    """Unless a sequence alone does. Nor has the output matrix more rows."""
    bins = MicrobatchSplitter(budget, "lm", None, torch.device("cpu")).rows(kit.CALLS["token-mean"], batch)
    assert sorted(row for rows in bins for row in rows) == list(range(len(batch)))
    for rows in bins:
        part = batch.take(rows)
        limit = max(budget, int(part.lengths.max()))
        assert num_computed(part) <= limit
        assert len(target_positions(part)) <= limit


def test_answers_to_a_long_prompt_share_a_micro_batch():
    # 8 answers of 6 tokens to a prompt of 50: 98 computed tokens, of 448.
    assert pack_sequences([56] * 8, 98, [0] * 8, [50] * 8) == [list(range(8))]
    ids = np.tile(np.concatenate((np.full(50, 9), np.zeros(6))), 8).astype(np.int64)
    ids[50::56] = np.arange(8)
    mask = np.tile(np.arange(56) >= 50, 8)
    columns = {"input_ids": Column(Unit.TOKEN, ids), "loss_mask": Column(Unit.TOKEN, mask)}
    batch = prepare_batch(Batch(np.arange(8), np.zeros(8, int), np.full(8, 56), columns), "lm")

    def sizes(budget):
        splitter = MicrobatchSplitter(budget, "lm", None, torch.device("cpu"))
        return [len(rows) for rows in splitter.rows(kit.CALLS["token-mean"], batch)]

    assert sizes(98) == [8]
    assert sizes(97) == [7, 1]
    assert sizes(74) == [4, 4]
    assert sizes(61) == [1] * 8
