"""Prompts that a group shares are computed once, with unchanged results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_kit as kit
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.shared_prefix import share_prefixes
from hflow.models import packed_attention
from hflow.models.attention_kernels import Reach, additive_mask, reaching_attention
from hflow.models.packed_attention import PackedLayout, attend
from hflow.training.interface import TrainShard
from hflow.types import Unit
from hflow.types.kernels import AttentionKernel

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


GROUPS = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), min_size=1, max_size=4)), min_size=1, max_size=3
)
"""Groups by the tokens of their prompt and of each answer. One without a token is the prompt alone."""


def batch_of_groups(groups: list[tuple[int, list[int]]]) -> Batch:
    """Groups with a prompt each, whose answers begin with different tokens."""
    rows = [
        (group, [group] * prompt + [10 + sample] * min(length, 1) + [7] * (length - 1))
        for group, (prompt, answers) in enumerate(groups)
        for sample, length in enumerate(answers)
    ]
    return batch_of(rows)


@settings(max_examples=60, deadline=None)
@given(
    GROUPS,
    st.sampled_from([Reach(), Reach(window=3), Reach(sinks=torch.tensor([0.3, -1.0, 0.0, 2.0]))]),
    st.sampled_from([AttentionKernel.SDPA, AttentionKernel.VARLEN]),
)
def test_attention_of_own_tokens_equals_that_of_whole_sequences(
    groups: list[tuple[int, list[int]]], reach: Reach, kernel: AttentionKernel
) -> None:
    batch = batch_of_groups(groups)
    sharing = share_prefixes(batch)
    if sharing is None:
        return
    torch.manual_seed(0)
    rows, heads = len(sharing.token_of_row), (4, 2, 2)
    inputs = [torch.randn(rows, num, 8, requires_grad=True) for num in heads]
    upstream = torch.randn(rows, 4, 8)
    whole = PackedLayout.of(batch.lengths, "cpu", torch.float32)
    expanded = (x[torch.from_numpy(sharing.row_of_token)] for x in inputs)
    wanted = attend(*expanded, whole, 0.3, reach)[torch.from_numpy(sharing.token_of_row)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "varlen_attention", sequence_by_sequence)
        if kernel is AttentionKernel.VARLEN:
            patch.setattr(packed_attention, "kernel_of", lambda *_: kernel)
        layout = PackedLayout.of(batch.lengths, "cpu", torch.float32, sharing)
        got = attend(*inputs, layout, 0.3, reach)
    torch.testing.assert_close(got, wanted)
    for one, other in zip(*(torch.autograd.grad(x, inputs, upstream) for x in (got, wanted)), strict=True):
        torch.testing.assert_close(one, other)


def sequence_by_sequence(
    kernel: AttentionKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cumulative: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    scaling: float,
    reach: Reach,
) -> torch.Tensor:
    """What a kernel for packed sequences computes, by its documentation."""
    queries, keys = (starts.diff().tolist() for starts in cumulative)
    assert longest == (max(queries), max(keys))
    parts = []
    for rows in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        one, key, value = (x.transpose(0, 1)[None] for x in rows)
        num, length = one.shape[2], key.shape[2]
        mask = additive_mask(torch.arange(length - num, length), length, q.dtype)[:, 0, 0]
        parts.append(reaching_attention(one, key, value, scaling, reach, mask)[0].transpose(0, 1))
    return torch.cat(parts)
