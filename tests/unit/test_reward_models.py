"""Reward models of Hugging Face: the same scores, in and out of their own layout, on both backends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_kit as kit
from late_megatron import megatron
from transformers import AutoConfig, AutoModelForSequenceClassification

from hflow.base.errors import BackendError
from hflow.config.schema import LoraConfig
from hflow.data.batches.batch import Batch
from hflow.models.merged import write_merged
from hflow.models.settings import ModelSettings, RankPosition
from hflow.training.fsdp.backend import TorchModel
from hflow.training.interface import TrainShard

PADDING = 5
TOKENS = [
    [7, 8, 9, 3, 4],
    [7, 8, 9],
    [7, PADDING, 9, 3, 4, 11, 12],
    [7, 8, PADDING, PADDING],  # its own last tokens are the padding token
    [PADDING, PADDING],
    [9],
]
FAMILIES = {
    "qwen2": kit.ARCHITECTURE,
    "llama": {**kit.ARCHITECTURE, "model_type": "llama", "tie_word_embeddings": False},
}
BACKENDS = ("torch", "megatron")


def build(backend: str, settings: ModelSettings) -> Any:
    kind = TorchModel if backend == "torch" else megatron("backend").MegatronModel
    return kind(settings, RankPosition())


@pytest.fixture(scope="module", params=FAMILIES)
def reward_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random `*ForSequenceClassification` with one label."""
    path = tmp_path_factory.mktemp(request.param)
    options = {**FAMILIES[request.param], "num_labels": 1, "pad_token_id": PADDING}
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**options))
    model.float().save_pretrained(path)
    return path


def batch_of(tokens: list[list[int]]) -> Batch:
    made = kit.make_batch([len(ids) for ids in tokens])
    column = made.columns["input_ids"]
    ids = np.concatenate([np.array(ids) for ids in tokens])
    return made.with_columns({"input_ids": type(column)(column.unit, ids)})


def scores(backend: Any) -> np.ndarray:
    call = kit.call(lambda out: out.scores, "sequence", [])
    (result,) = backend.infer(call, [batch_of(TOKENS)])
    return np.asarray(result.columns["result"].values)


@torch.no_grad()
def their_scores(path: Path) -> np.ndarray:
    """The scores of transformers for a batch that is padded on the right."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    width = max(map(len, TOKENS))
    ids = torch.tensor([[*ids, *[PADDING] * (width - len(ids))] for ids in TOKENS])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in TOKENS])
    return model(input_ids=ids, attention_mask=mask).logits[:, 0].numpy()


def opened(backend: str, path: Path, **changes: Any) -> Any:
    return build(backend, ModelSettings(name="rm", head="score", path=str(path), **changes))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_are_those_of_transformers(reward_model: Path, backend: str) -> None:
    np.testing.assert_allclose(scores(opened(backend, reward_model)), their_scores(reward_model), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saved_reward_model_is_one_of_transformers(
    reward_model: Path, backend: str, tmp_path: Path
) -> None:
    ours = opened(backend, reward_model, trainable=True)
    call = kit.call(lambda out: out.scores, "sequence", [], reduce="seq-mean")
    ours.train(call, [TrainShard((batch_of(TOKENS),))], 0)
    ours.save(str(tmp_path))()
    config = json.loads((tmp_path / "config.json").read_text())
    saved = json.loads((reward_model / "config.json").read_text())
    assert (config["architectures"], len(config["id2label"])) == (saved["architectures"], 1)
    assert not (tmp_path / "score_head.safetensors").exists()
    np.testing.assert_allclose(their_scores(tmp_path), scores(ours), atol=1e-5)
    assert np.abs(their_scores(tmp_path) - their_scores(reward_model)).max() > 1e-6
    np.testing.assert_allclose(scores(opened(backend, tmp_path)), scores(ours), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_merged_adapter_of_a_reward_model_has_its_head(
    reward_model: Path, backend: str, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    ours = opened(backend, reward_model, trainable=True, lora=LoraConfig(r=2, alpha=4))
    call = kit.call(lambda out: out.scores, "sequence", [], reduce="seq-mean")
    for step in (0, 1):  # B is 0 at first, so A has no gradient
        ours.train(call, [TrainShard((batch_of(TOKENS),))], step)
    ours.save(str(tmp_path / "adapter"))()
    write_merged(tmp_path / "adapter", reward_model, tmp_path / "merged")
    assert np.abs(their_scores(tmp_path / "merged") - their_scores(reward_model)).max() > 1e-6
    np.testing.assert_allclose(their_scores(tmp_path / "merged"), scores(ours), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_critic_starts_from_the_backbone_of_a_reward_model(reward_model: Path, backend: str) -> None:
    settings = ModelSettings(name="critic", head="value", path=str(reward_model), trainable=True)
    names = {name for name, _ in build(backend, settings).weights()}
    assert "value_head.weight" in names
    assert "score.weight" not in names
    with pytest.raises(
        BackendError, match=r"has no value_head.safetensors: it is not the checkpoint of a value"
    ):
        build(backend, ModelSettings(name="critic", head="value", path=str(reward_model)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_labels_are_refused(tmp_path: Path, backend: str) -> None:
    options = {**kit.ARCHITECTURE, "num_labels": 2, "pad_token_id": PADDING}
    AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**options)).save_pretrained(tmp_path)
    with pytest.raises(BackendError, match=r"the score head in .* has .*\[2, 32\]"):
        opened(backend, tmp_path)
