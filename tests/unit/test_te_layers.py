"""Layers of Transformer Engine, with a stand-in for it: megatron's wrappers and hflow's code are real.

Outputs, gradients, weights and checkpoints are compared with transformers, training with the torch backend.
"""

from __future__ import annotations

from pathlib import Path

import megatron_kit as kit
import megatron_twins as twins
import pytest
import ranks
import shard_cases
import te_cases as cases
import torch
import torch_kit
from test_megatron_model import (  # the same tests, of other ranks
    test_exported_weights_equal_the_loaded_ones,
    test_gradients,
    test_megatron_counts_every_weight_once_in_norms,
    test_outputs,
    test_ranks_hold_blocks_of_the_weights,
    test_saved_models_load_in_transformers,
)

__all__ = [
    "test_exported_weights_equal_the_loaded_ones",
    "test_gradients",
    "test_megatron_counts_every_weight_once_in_norms",
    "test_outputs",
    "test_ranks_hold_blocks_of_the_weights",
    "test_saved_models_load_in_transformers",
]

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("te")
    for case in kit.CASES.values():
        kit.write_checkpoint(case, path)
    twins.save_checkpoint(path / "checkpoint")
    for name, architecture in cases.FP8_MODELS.items():
        torch_kit.model(architecture=architecture).save(str(path / "checkpoint" / name))()
    ranks.start(cases.run, (str(path),), 4, is_fresh=True)
    return path


@pytest.mark.parametrize("name", cases.TWINS)
def test_training_equals_one_process_of_the_torch_backend(directory, name):
    twins.assert_trains_as_torch(directory, name, cases.TWINS[name])


@pytest.mark.parametrize("name", cases.FP8_TWINS)
def test_training_in_fp8_is_near_the_torch_backend(directory, name):
    """The stand-in refuses rows and sizes of which a rank has no multiple."""
    twin = cases.FP8_TWINS[name]
    wanted = twins.expected(twin.node, twin.dtype, directory / "checkpoint").metrics
    for rank in twin.heads:
        metrics, _ = torch.load(directory / f"{name}.{rank}.pt", weights_only=False)
        assert [one["num_tokens"] for one in metrics] == [one["num_tokens"] for one in wanted]
        assert metrics[0]["loss"] != wanted[0]["loss"]
        assert metrics[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=2e-3)
        assert metrics[0]["grad_norm"] == pytest.approx(wanted[0]["grad_norm"], rel=0.02)
        assert metrics[1]["loss"] == pytest.approx(wanted[1]["loss"], rel=0.01)


def test_ranks_and_padding_change_no_scale_of_rows(directory):
    """Scales of 32 values do not depend on the layout, as padding is zero."""
    first, other = (name for name in cases.FP8_TWINS if name.startswith("fp8") and "mxfp8" in name)
    (got, weights), (wanted, wanted_weights) = (
        torch.load(directory / f"{name}.{cases.FP8_TWINS[name].heads[0]}.pt", weights_only=False)
        for name in (first, other)
    )
    for one, another in zip(got, wanted, strict=True):
        assert twins.comparable(one) == pytest.approx(twins.comparable(another), rel=1e-4)
    for key in weights.keys() & wanted_weights.keys():
        torch.testing.assert_close(weights[key], wanted_weights[key], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("writer", "reader"), cases.PAIRS)
def test_sharded_checkpoints_go_between_kernels_and_backends(directory, writer, reader):
    name = shard_cases.read(cases.SIDES[writer], cases.SIDES[reader])
    wanted = twins.expected("experts", "fp32", directory / "checkpoint")
    metrics = torch.load(directory / f"{name}.metrics.pt", weights_only=False)
    assert twins.comparable(metrics) == pytest.approx(
        wanted.metrics[shard_cases.NUM_WRITTEN], rel=2e-5, abs=1e-6
    )
    weights = torch.load(directory / f"{name}.weights.pt")
    for tensor, values in wanted.weights.items():
        torch.testing.assert_close(weights[tensor], values, atol=1e-5, rtol=0)
