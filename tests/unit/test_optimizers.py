"""Optimizers: their steps are those of known implementations, and the same in every layout."""

from __future__ import annotations

from pathlib import Path

import megatron_twins as twins
import pytest
import ranks
import shard_cases as cases
import torch


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("optimizers")
    twins.save_checkpoint(path / "checkpoint")
    ranks.start(cases.exchange_optimizers, (str(path),), 4)
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "writer", "reader"),
    [(name, *pair) for name, (_, pairs) in cases.OF_OPTIMIZERS.items() for pair in pairs],
)
def test_every_layout_trains_and_resumes_as_one_process(directory, name, writer, reader):
    """Two steps in one layout and a third in another are three in one process."""
    sides, _ = cases.OF_OPTIMIZERS[name]
    side = sides[reader]
    wanted = twins.expected(side.twin.node, "fp32", directory / "checkpoint", side.twin.settings["optim"])
    files = cases.read(sides[writer], side)
    metrics = torch.load(directory / f"{files}.metrics.pt", weights_only=False)
    assert twins.comparable(metrics) == pytest.approx(wanted.metrics[cases.NUM_WRITTEN], rel=2e-5, abs=1e-6)
    weights = torch.load(directory / f"{files}.weights.pt")
    assert weights.keys() == wanted.weights.keys()
    for tensor, values in wanted.weights.items():
        torch.testing.assert_close(weights[tensor], values, atol=1e-5, rtol=0)
