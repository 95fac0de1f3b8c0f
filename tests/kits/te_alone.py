"""What one process with the stand-in for Transformer Engine computes. Prints one line for each result."""

from __future__ import annotations

import sys
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import te_cases

sys.path.insert(0, str(te_cases.STAND_IN))

import numpy as np
import pytest
import torch
import torch_kit as kit

from hflow.base.errors import BackendError
from hflow.data.batches.batch import Column
from hflow.doctor.gpus import check_layers
from hflow.models.settings import ModelSettings, RankPosition
from hflow.planner.weights.weight_slices import WeightSlice
from hflow.training.megatron.device import prepare
from hflow.types import Unit
from hflow.types.kernels import Fp8Recipe, installed_transformer_engine
from hflow.weights.outgoing import _SliceReader

prepare("cpu")

import transformer_engine.pytorch as te_package  # noqa: E402
import transformer_engine.pytorch.module as te  # noqa: E402
from megatron.core.extensions.transformer_engine import (  # noqa: E402
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)

from hflow.training.megatron.backend import MegatronModel  # noqa: E402
from hflow.training.megatron.te_layers import SeparateExperts  # noqa: E402

_MADE = kit.make_batch(kit.LENGTHS)
_IDS = np.maximum(_MADE.columns["input_ids"].values, 1)
BATCH = _MADE.with_columns({"input_ids": Column(Unit.TOKEN, _IDS)})
"""Samples without token 0."""


def main() -> None:
    print("installed", installed_transformer_engine())
    state = torch.get_rng_state()
    settings = ModelSettings(name="actor", architecture=kit.MIXED, kernels="transformer_engine")
    model = MegatronModel(settings, RankPosition())
    assert torch.equal(torch.get_rng_state(), state)
    check_modules(model)
    check_slices(model)
    for node, architecture in te_cases.FP8_MODELS.items():
        for recipe in Fp8Recipe:
            check_fp8(recipe, architecture)
            print("fp8", recipe, node)
    check_resume()
    print("refused", refusal())
    for finding in check_layers("cpu"):
        print(finding.name, finding.ok, finding.detail)
    quantize = te.quantize
    te.quantize = lambda *options: 1.05 * quantize(*options)
    for finding in list(check_layers("cpu"))[2:]:
        print("wrong", finding.name, finding.ok, finding.detail)
    te.quantize = quantize
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


def fp8_model(recipe: Fp8Recipe | None, architecture: dict[str, Any], **changes: Any) -> MegatronModel:
    settings = replace(
        kit.SETTINGS, architecture=architecture, kernels="transformer_engine", fp8=recipe, **changes
    )
    return MegatronModel(settings, RankPosition())


def logprobs(model: MegatronModel) -> np.ndarray:
    (found,) = model.infer(kit.LOGPROBS, [BATCH])
    return found.columns["result"].values


def step(model: MegatronModel, number: int = 0) -> dict[str, float]:
    return model.train(kit.CALLS["token-mean"], kit.whole(BATCH), number)


def check_fp8(recipe: Fp8Recipe, architecture: dict[str, Any]) -> None:
    """Products in FP8 are near those in fp32, padding counts for nothing, and nothing is kept of weights."""
    plain, model = (fp8_model(kind, architecture, tokens_per_microbatch=13) for kind in (None, recipe))
    wanted, found = logprobs(plain), logprobs(model)
    gap = np.abs(found - wanted).max()
    assert 1e-3 < gap < 0.1, gap
    with torch.no_grad():  # the token that padding has, and no sample
        model._stage.module.embedding.word_embeddings.weight[0] *= 1000
    assert np.array_equal(logprobs(model), found)
    trained, trained_plain = step(model), step(plain)
    assert trained["num_tokens"] == trained_plain["num_tokens"]
    assert trained["loss"] == pytest.approx(trained_plain["loss"], rel=0.15)
    assert not any(getattr(module, "_workspaces", None) for module in model._stage.module.modules())
    again = fp8_model(recipe, architecture, tokens_per_microbatch=13, activation_checkpointing=True)
    recomputed = step(again)
    unscaled = fp8_model(recipe, architecture, tokens_per_microbatch=13)
    assert recomputed == step(unscaled)


def check_resume() -> None:
    """A run in FP8 that continues from its shards is the run that was not interrupted."""
    (architecture, _), recipe = te_cases.FP8_MODELS.values(), Fp8Recipe.TENSORWISE
    whole, other = fp8_model(recipe, architecture), fp8_model(recipe, architecture, seed=8)
    step(whole)
    with TemporaryDirectory() as directory:
        whole.save_shards(directory)()
        other.load_shards(directory)
    assert step(whole, 1) == step(other, 1)
    assert np.array_equal(logprobs(whole), logprobs(other))


def refusal() -> str:
    """Return the message on a device without FP8."""
    with patch.object(te_package, "is_fp8_available", lambda return_reason: (False, "Device is too old.")):
        try:
            fp8_model(Fp8Recipe.TENSORWISE, te_cases.FP8_MODELS["fp8"])
        except BackendError as error:
            return str(error)
    return "nothing"


def check_slices(model: MegatronModel) -> None:
    """Slices over several experts, which have parameters of their own, are those of the whole tensors."""
    read, name = _SliceReader(model), "model.layers.1.mlp.experts.up_proj.weight"
    whole = dict(model.weights())[name]
    box = ((1, 4), (2, 9), (0, 32))
    assert torch.equal(read(WeightSlice(name, tuple(whole.shape), box, 0)), whole[1:4, 2:9])


main()
