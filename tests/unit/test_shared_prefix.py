"""Prompts that a group shares are computed once, with unchanged results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_kit as kit
from hypothesis import given
from hypothesis import strategies as st

from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.shared_prefix import share_prefixes
from hflow.training.interface import TrainShard
from hflow.types import Unit

SEQUENCES = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=5)), min_size=1, max_size=8
)


def batch_of(rows: list[tuple[int, list[int]]]) -> Batch:
    lengths = np.array([len(ids) for _, ids in rows])
    ids = np.array([token for _, tokens in rows for token in tokens])
    groups = np.array([group for group, _ in rows])
    return Batch(np.arange(len(rows)), groups, lengths, {"input_ids": Column(Unit.TOKEN, ids)})


def test_a_prompt_of_three_tokens_and_three_answers() -> None:
    sharing = share_prefixes(batch_of([(0, [5, 6, 7, 1]), (0, [5, 6, 7, 2, 3]), (0, [5, 6, 7, 4])]))
    assert sharing is not None
    assert sharing.token_of_row.tolist() == [0, 1, 2, 3, 7, 8, 12]
    assert sharing.row_of_token.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 0, 1, 2, 6]


@given(SEQUENCES)
def test_a_row_represents_tokens_with_the_same_prefix(rows: list[tuple[int, list[int]]]) -> None:
    batch = batch_of(rows)
    sharing = share_prefixes(batch)
    if sharing is None:
        return
    past = [(group, tuple(ids[: i + 1])) for group, ids in rows for i in range(len(ids))]
    stands_for = [past[token] for token in sharing.token_of_row]
    assert [stands_for[row] for row in sharing.row_of_token] == past


def shared_batch() -> Batch:
    """Groups of two that share their first third, of several lengths, and in no order."""
    batch = kit.make_batch([9, 9, 6, 12, 10, 7, 9, 4], seed=4)
    ids = batch.columns["input_ids"].values.copy()
    for first, second in ((0, 1), (2, 3), (4, 5), (6, 7)):
        a, b = batch.offsets[first], batch.offsets[second]
        num = min(batch.lengths[first], batch.lengths[second]) // 2
        ids[b : b + num] = ids[a : a + num]
    return batch.with_columns({"input_ids": Column(Unit.TOKEN, ids)}).take([3, 0, 5, 6, 1, 2, 7, 4])


def apart(batch: Batch) -> Batch:
    """The same samples, each a group of its own: nothing is shared."""
    return Batch(batch.samples, batch.samples, batch.lengths, batch.columns)


@pytest.mark.parametrize("budget", [1000, 25], ids=["one micro-batch", "several"])
def test_training_is_the_same_with_and_without_sharing(budget: int) -> None:
    batch = shared_batch()
    assert share_prefixes(batch) is not None
    assert share_prefixes(apart(batch)) is None
    trained = []
    for part in (batch, apart(batch)):
        backend = kit.model(tokens_per_microbatch=budget)
        metrics = backend.train(kit.CALLS["token-mean"], [TrainShard((part,))], 0)
        trained.append((metrics["loss"], metrics["grad_norm"], kit.weights(backend)))
    (loss, norm, weights), (other_loss, other_norm, others) = trained
    assert loss == pytest.approx(other_loss, abs=1e-6)
    assert norm == pytest.approx(other_norm, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], atol=1e-5, rtol=0)
