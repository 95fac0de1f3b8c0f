"""Parts of a model that sees which are not trained: a frozen tower, and all but adapters."""

import dataclasses

import numpy as np
import pytest
import torch
import torch_kit
import vision_kit as kit

from hflow.config.schema import LoraConfig, OptimConfig
from hflow.shapes.architectures import read_shape
from hflow.shapes.model_shape import tensors
from hflow.training.interface import TrainShard
from hflow.vision.interface import vision_family

SIZES = [[(40, 24)], [], [(16, 16), (24, 40)]]
CALL = dataclasses.replace(torch_kit.CALLS["token-mean"], options={"reduce": "token-mean"})


def trained(family, **changes):
    """Return a model after a step, and its weights before."""
    backend = kit.model(family, **changes)
    before = {name: tensor.clone() for name, tensor in torch_kit.weights(backend).items()}
    batch = kit.batch_of(kit.trajectories(family, SIZES))
    backend.train(CALL, [TrainShard((batch,))], 0)
    return backend, before


def is_of_tower(family, name):
    prefix = "model.text_model" if family == "smolvlm" else "model.language_model"
    return not name.startswith((prefix, "lm_head"))


@pytest.mark.parametrize("family", kit.ARCHITECTURES)
def test_a_frozen_tower_stays_and_is_sent(family):
    backend, before = trained(family, freeze="vision")
    after = torch_kit.weights(backend)
    assert after.keys() == {spec.name for spec in tensors(read_shape(kit.ARCHITECTURES[family]))}
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == is_of_tower(family, name), name
    tower = vision_family(kit.config_of(family)).encoder.tower(backend._model.base_model)
    assert all(weight.grad is None for weight in tower.parameters())


@pytest.mark.parametrize("family", kit.ARCHITECTURES)
def test_the_language_model_trains_the_same_beside_a_frozen_tower(family):
    """Gradients of the language model do not depend on whether those of the tower are computed."""
    changes = {"optim": OptimConfig(lr=1.0, eps=1.0, clip_grad=0.0)}  # steps in proportion to gradients
    whole, _ = trained(family, **changes)
    part, _ = trained(family, freeze="vision", **changes)
    others = torch_kit.weights(part)
    assert any(not torch.equal(others[name], x) for name, x in torch_kit.weights(whole).items())
    for name, tensor in torch_kit.weights(whole).items():
        if not is_of_tower(family, name):
            torch.testing.assert_close(others[name], tensor, atol=1e-6, rtol=1e-5)


def test_a_frozen_tower_is_saved_and_loaded(tmp_path):
    """With states of 0, so that a later run may train it."""
    backend, _ = trained("qwen3_vl", freeze="vision")
    backend.save_shards(str(tmp_path / "shards"))()
    other = kit.model("qwen3_vl", freeze="vision", seed=7)
    other.load_shards(str(tmp_path / "shards"))
    weights = torch_kit.weights(other)
    assert all(torch.equal(weights[name], x) for name, x in torch_kit.weights(backend).items())
    thawed = kit.model("qwen3_vl", seed=7)
    thawed.load_shards(str(tmp_path / "shards"))
    assert all(torch.equal(torch_kit.weights(thawed)[name], x) for name, x in weights.items())


@pytest.mark.parametrize("family", kit.ARCHITECTURES)
def test_adapters_are_in_the_language_model(family, tmp_path):
    """Modules of towers have the names of targets, too."""
    pytest.importorskip("peft")
    backend, before = trained(family, lora=LoraConfig(r=4, alpha=8))
    after = torch_kit.weights(backend)
    assert after.keys() == before.keys()
    assert all(not is_of_tower(family, name) for name in after)
    assert len(after) == 2 * 7 * kit.ARCHITECTURES[family]["text_config"]["num_hidden_layers"]
    assert any(not np.array_equal(after[name], before[name]) for name in after)
    backend.save(str(tmp_path / "adapter"))()
    from peft import PeftConfig

    assert PeftConfig.from_pretrained(tmp_path / "adapter").exclude_modules
