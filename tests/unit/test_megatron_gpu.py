"""The CUDA path of megatron, on one device: the same numbers as the torch backend on the CPU."""

import dataclasses
from importlib.util import find_spec

import numpy as np
import pytest
import torch_kit as kit

from hflow.doctor.gpus import check_layers
from hflow.models.settings import RankPosition
from hflow.planner.models.descriptors import factories
from hflow.types.kernels import install_problem, installed_transformer_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not find_spec("megatron"), reason="needs megatron-core")]


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 5e-2)])
def test_a_step_equals_the_cpu(dtype, tolerance):
    batch = kit.make_batch(kit.LENGTHS)
    settings = dataclasses.replace(kit.SETTINGS, device="cuda", dtype=dtype, tokens_per_microbatch=13)
    here, there = kit.model(), factories()["megatron"](settings, RankPosition())
    first, other = (b.infer(kit.LOGPROBS, [batch])[0].columns["result"].values for b in (here, there))
    np.testing.assert_allclose(other, first, atol=tolerance)
    wanted, got = (b.train(kit.CALLS["token-mean"], kit.whole(batch), 0) for b in (here, there))
    assert got["loss"] == pytest.approx(wanted["loss"], abs=tolerance)
    assert got["entropy"] == pytest.approx(wanted["entropy"], abs=tolerance)


@pytest.mark.skipif(
    install_problem(installed_transformer_engine()) != "", reason="no Transformer Engine that fits"
)
def test_layers_of_transformer_engine_are_those_of_torch():
    found = list(check_layers("cuda"))
    assert [finding.name for finding in found[:2]] == ["layers", "experts"]
    assert all(finding.ok for finding in found), found
