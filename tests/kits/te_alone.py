"""What one process with the stand-in for Transformer Engine computes. Prints one line for each result."""

from __future__ import annotations

import sys

import te_cases

sys.path.insert(0, str(te_cases.STAND_IN))

import torch
import torch_kit as kit

from hflow.doctor.gpus import check_layers
from hflow.models.settings import ModelSettings, RankPosition
from hflow.planner.weights.weight_slices import WeightSlice
from hflow.training.megatron.device import prepare
from hflow.types.kernels import installed_transformer_engine
from hflow.weights.outgoing import _SliceReader

prepare("cpu")

import transformer_engine.pytorch.module as te  # noqa: E402
from megatron.core.extensions.transformer_engine import (  # noqa: E402
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)

from hflow.training.megatron.backend import MegatronModel  # noqa: E402
from hflow.training.megatron.te_layers import SeparateExperts  # noqa: E402


def main() -> None:
    print("installed", installed_transformer_engine())
    state = torch.get_rng_state()
    settings = ModelSettings(name="actor", architecture=kit.MIXED, kernels="transformer_engine")
    model = MegatronModel(settings, RankPosition())
    assert torch.equal(torch.get_rng_state(), state)
    check_modules(model)
    check_slices(model)
    for finding in check_layers("cpu"):
        print(finding.name, finding.ok, finding.detail)
    normalized = te._normalized
    te._normalized = lambda x, weight, eps: normalized(x, 1.05 * weight, eps)
    for finding in check_layers("cpu"):
        print("wrong", finding.name, finding.ok, finding.detail)

    def fail(*_: object) -> None:
        raise AssertionError("no kernel\nmore lines")

    te._normalized = fail
    for finding in check_layers("cpu"):
        print("failing", finding.name, finding.ok, finding.detail)


def check_modules(model: MegatronModel) -> None:
    """All linear layers are Transformer Engine's, and only what it has for FP8 is not a parameter."""
    dense, mixed, _ = model._stage.module.decoder.layers
    assert isinstance(dense.self_attention.linear_qkv, TELayerNormColumnParallelLinear)
    assert isinstance(dense.self_attention.linear_proj, TERowParallelLinear)
    assert isinstance(dense.mlp.linear_fc1, TELayerNormColumnParallelLinear)
    assert isinstance(dense.mlp.linear_fc2, TERowParallelLinear)
    assert isinstance(mixed.mlp.experts, SeparateExperts)
    assert isinstance(mixed.pre_mlp_layernorm, te.RMSNorm)
    names = set(dict(model._stage.module.named_parameters()))
    others = set(model._stage.module.state_dict()) - names
    assert others
    assert all("_extra_state" in name for name in others), others


def check_slices(model: MegatronModel) -> None:
    """Slices over several experts, which have parameters of their own, are those of the whole tensors."""
    read, name = _SliceReader(model), "model.layers.1.mlp.experts.up_proj.weight"
    whole = dict(model.weights())[name]
    box = ((1, 4), (2, 9), (0, 32))
    assert torch.equal(read(WeightSlice(name, tuple(whole.shape), box, 0)), whole[1:4, 2:9])


main()
