"""Families whose layers are not Llama's, trained by megatron: metrics and weights of the torch backend."""

from __future__ import annotations

from pathlib import Path

import megatron_twins as twins
import pytest
import ranks

from hflow.shapes.model_shape import is_in_fp32


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families")
    twins.save_families(path / "checkpoint")
    ranks.start(twins.train_families_often, (str(path),), 4)
    return path


@pytest.fixture(scope="module")
def others(directory: Path) -> Path:
    (directory / "store").unlink()
    ranks.start(twins.train_families, (str(directory),), 4)
    return directory


@pytest.mark.parametrize("name", twins.OFTEN_TWINS)
def test_equals_one_process(directory, name):
    """Metrics of two steps, with gradient norms, and the weights and biases of routers after them."""
    twins.assert_trains_as_torch(directory, name, twins.OFTEN_TWINS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", twins.FAMILY_TWINS)
def test_other_layouts_equal_one_process(others, name):
    twins.assert_trains_as_torch(others, name, twins.FAMILY_TWINS[name])


@pytest.mark.parametrize("family", twins.FAMILIES)
def test_weights_move(directory, family):
    """By much more than the tolerance of the comparisons; biases of routers where they follow the load."""
    balance = twins.NODES[family][1].get("balance")
    wanted = twins.expected(family, "fp32", directory / "checkpoint").weights
    start = twins.initial_weights(family, directory / "checkpoint")
    for name, tensor in start.items():
        is_still = is_in_fp32(name) and not (balance and balance.bias_rate)
        assert ((wanted[name] - tensor).abs().max() > 1e-4) == (not is_still), name
