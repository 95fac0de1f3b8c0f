"""Inference by megatron equals the torch backend in one process; columns are sent only where they are
read."""

from __future__ import annotations

from pathlib import Path

import megatron_twins as twins
import numpy as np
import pytest
import ranks
import torch
import torch_kit as kit
from torch.testing import assert_close

from hflow.types import Unit


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("infer")
    # The checkpoint is a critic's as well.
    kit.model(head="value").save(str(path / "checkpoint"))()
    twins.save_checkpoint(path / "checkpoint")
    kit.model(head="score").save(str(path / "checkpoint" / "score"))()
    ranks.start(twins.infer, (str(path),), 4)
    return path


@pytest.mark.parametrize("name", twins.INFER_TWINS)
def test_equals_one_process(directory, name):
    twin = twins.INFER_TWINS[name]
    wanted = twins.inferred(twin.node, directory / "checkpoint")
    for rank in range(twin.num_ranks):
        results = torch.load(directory / f"{name}.{rank}.pt", weights_only=False)
        assert results.keys() == wanted.keys()
        for call, returned in results.items():
            if rank not in twin.heads:
                assert returned == []
                continue
            ((result,), (shard,)) = returned, twins.infer_shards(twin.data, twin.heads.index(rank))
            assert result.samples.tolist() == shard.samples.tolist()
            assert_same(result, wanted[call].take(shard.samples))


def assert_same(result, wanted) -> None:
    assert result.columns.keys() == wanted.columns.keys()
    for field, column in wanted.columns.items():
        got = result.columns[field]
        assert got.unit is column.unit
        if isinstance(column.values, list):
            assert got.values == column.values
            continue
        assert got.values.dtype == column.values.dtype
        assert_close(torch.from_numpy(got.values), torch.from_numpy(column.values), atol=1e-5, rtol=0)


def test_stages_receive_only_the_columns_that_they_read(directory):
    """Layers read tokens, and which count, on both stages; rank 2, the head of the last, has all columns."""
    received = [torch.load(directory / f"received.{rank}.pt", weights_only=False) for rank in range(4)]
    batch = twins.batch()
    for rank, minibatches in enumerate(received):
        (minibatch,) = minibatches
        assert minibatch.num_microbatches == 3
        assert minibatch.totals == {Unit.TOKEN: 7}
        for part, rows in zip(minibatch.microbatches, ([0, 1], [2]), strict=True):
            whole = batch.take(rows)
            added = {"is_learned", "num_learned", "num_sequences"}
            of_layers = {"input_ids", "routed_experts", "is_learned", "num_sequences"}
            names = of_layers if rank < 2 else {*whole.columns, *added}
            assert part.columns.keys() == names
            for name in names - {*added, "loss_mask"}:
                values = part.columns[name].values
                assert values.dtype == whole.columns[name].values.dtype
                assert np.array_equal(values, whole.columns[name].values)
            assert part.lengths.tolist() == whole.lengths.tolist()
            assert part.groups.tolist() == whole.groups.tolist()


def test_a_body_that_fails_is_reported(directory):
    """All tensor ranks run the body and report it; an earlier stage ends with a timeout."""
    for rank in (0, 1):
        text = (directory / f"failed {twins.Twin('sft', tensor=2).name}.{rank}").read_text()
        assert text == "ZeroDivisionError: division by zero"
    first, last = ((directory / f"failed {twins.Twin('sft', pipe=2).name}.{r}").read_text() for r in (0, 1))
    assert last == "ZeroDivisionError: division by zero"
    assert first.startswith("RuntimeError: ")
