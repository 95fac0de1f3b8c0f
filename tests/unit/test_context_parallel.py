"""Rows and keys of context ranks, against what each token attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_megatron import megatron

from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.shared_prefix import share_prefixes
from hflow.types import Unit

if TYPE_CHECKING:
    from hflow.training.megatron.context_parallel import RowDivision

CPU = torch.device("cpu")


class Rank:
    """The two facts that a division needs of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


def batch(lengths: list[int], shared: int = 0) -> Batch:
    """Sequences in groups of two, which begin with the same tokens; the second half of each is learned."""
    number = np.arange(len(lengths))
    places = [np.arange(n) for n in lengths]
    ids = [np.where(at < shared, i // 2, 100 + 50 * i + at) for i, at in enumerate(places)]
    learned = [at >= max(len(at) // 2, 1) for at in places]
    columns = {
        "input_ids": Column(Unit.TOKEN, np.concatenate(ids)),
        "loss_mask": Column(Unit.TOKEN, np.concatenate(learned)),
    }
    return Batch(number, number // 2, np.array(lengths), columns)


def divide(samples: Batch, num_ranks: int, multiple: int = 1) -> list[RowDivision]:
    sharing = share_prefixes(samples)
    return [
        megatron("context_parallel").divide_rows(samples, sharing, Rank(c, num_ranks), multiple, CPU, True)
        for c in range(num_ranks)
    ]


def test_a_rank_has_an_early_and_a_late_chunk() -> None:
    first, second = divide(batch([8]), 2)
    assert first.rows.tolist() == [0, 1, 6, 7]
    assert second.rows.tolist() == [2, 3, 4, 5]
    assert first.segments == ((2, 2), (2, 8))  # tokens 0 and 1 attend to 2 keys, tokens 6 and 7 to all
    assert second.segments == ((4, 6),)
    # The ranks' rows one after another are 0 1 6 7 2 3 4 5, of which the keys are 0 1, and 0 to 7 in order.
    assert first.keys.tolist() == [0, 1, 0, 1, 4, 5, 6, 7, 2, 3]
    # Learned tokens 4 to 7 are predicted by rows 3, 4, 5, of the second rank, and 6, of the first one.
    assert (first.learned.tolist(), first.learned_rows.tolist()) == ([3], [2])
    assert (second.learned.tolist(), second.learned_rows.tolist()) == ([0, 1, 2], [1, 2, 3])


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=6),
    shared=st.integers(0, 9),
    num_ranks=st.integers(2, 4),
    multiple=st.sampled_from([1, 2]),
)
def test_every_row_attends_to_its_sequence_up_to_itself(
    lengths: list[int], shared: int, num_ranks: int, multiple: int
) -> None:
    samples = batch(lengths, shared)
    sharing = share_prefixes(samples)
    tokens = np.arange(samples.num_tokens) if sharing is None else sharing.token_of_row
    rows = tokens if sharing is None else sharing.row_of_token
    divisions = divide(samples, num_ranks, multiple)
    whole = torch.cat([each.rows for each in divisions])
    computed = torch.cat([each.rows[: each.num_queries] for each in divisions]).tolist()
    assert sorted(computed) == list(range(len(tokens)))
    assert len({len(each.rows) for each in divisions}) == 1
    assert len(divisions[0].rows) % multiple == 0
    predicted = torch.cat([each.learned for each in divisions]).tolist()
    targets = np.flatnonzero(samples.columns["loss_mask"].values)
    assert sorted(predicted) == list(range(len(targets)))
    for each in divisions:
        assert each.rows[each.learned_rows].tolist() == rows[targets[each.learned.numpy()] - 1].tolist()
        keys = iter(whole[each.keys].split([k for _, k in each.segments]))
        queries = iter(each.rows[: each.num_queries].tolist())
        for num_queries, num_keys in each.segments:
            segment = next(keys)
            for i in range(num_queries):
                token = tokens[next(queries)]
                start = samples.offsets[np.searchsorted(samples.offsets, token, side="right") - 1]
                seen = segment[: num_keys - num_queries + i + 1]
                assert seen.tolist() == rows[start : token + 1].tolist()


def test_long_sequences_are_divided_into_equal_work() -> None:
    for each in divide(batch([4096]), 4):
        pairs = sum(q * k - q * (q - 1) // 2 for q, k in each.segments)
        assert pairs == pytest.approx(4096 * 4097 / 2 / 4, rel=1e-3)
