"""Checkpoints in HF layout: saved models load again, and wrong ones are rejected by name."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_kit as kit
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hflow.base.errors import BackendError
from hflow.base.files import read_json_object

UNTIED = kit.ARCHITECTURE | {"tie_word_embeddings": False}
BATCH = kit.make_batch([5, 9, 3])


@pytest.mark.parametrize("architecture", [kit.ARCHITECTURE, UNTIED])
def test_a_saved_language_model_loads_again(tmp_path, architecture):
    backend = kit.model(architecture=architecture)
    backend.save(str(tmp_path))()
    again = kit.model(architecture=None, path=str(tmp_path))
    names = [name for name, _ in backend.weights()]
    assert ("lm_head.weight" in names) is (architecture is UNTIED)
    assert len(names) == len(set(names))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in kit.weights(backend).items():
        assert torch.equal(kit.weights(again)[name], tensor)
        assert torch.equal(theirs[name], tensor)


@pytest.mark.parametrize("kind", ["value", "score"])
@pytest.mark.parametrize("architecture", [kit.ARCHITECTURE, UNTIED])
def test_a_saved_scalar_model_loads_again(tmp_path, kind, architecture):
    backend = kit.model(head=kind, architecture=architecture)
    call = (
        kit.VALUE if kind == "value" else kit.call(lambda out: out.scores, "sequence", [], reduce="seq-mean")
    )
    backend.train(call, kit.whole(kit.make_batch(kit.LENGTHS)), 0)
    backend.save(str(tmp_path))()
    again = kit.model(head=kind, architecture=None, path=str(tmp_path), trainable=False)
    wanted = kit.weights(backend)
    assert ("value_head.bias" if kind == "value" else "score.weight") in wanted
    assert "lm_head.weight" not in wanted
    for name, tensor in kit.weights(again).items():
        assert torch.equal(wanted[name], tensor)


def test_a_critic_starts_from_a_language_model(tmp_path):
    actor = kit.model(architecture=UNTIED)
    actor.save(str(tmp_path))()
    critic = kit.model(head="value", architecture=None, path=str(tmp_path))
    for name, tensor in kit.weights(critic).items():
        if name.startswith("model."):
            assert torch.equal(kit.weights(actor)[name], tensor)
    with pytest.raises(BackendError, match=r"has no score.weight: it is not a reward model"):
        kit.model(head="score", architecture=None, path=str(tmp_path), trainable=False)


def test_weights_are_saved_in_the_dtype_of_training(tmp_path):
    """A frozen model that update nodes change has no shards, so it is saved as it is stored, in fp32."""
    for dtype, trainable in (("bf16", True), ("bf16", False), ("fp32", True)):
        directory = tmp_path / f"{dtype}-{trainable}"
        kit.model(dtype=dtype, trainable=trainable).save(str(directory))()
        saved_dtype = torch.bfloat16 if dtype == "bf16" and trainable else torch.float32
        config = read_json_object(directory / "config.json")
        assert config["dtype"] == str(saved_dtype).removeprefix("torch.")
        assert config["architectures"] == ["Qwen2ForCausalLM"]
        saved = load_file(directory / "model.safetensors")
        for name, tensor in kit.weights(kit.model()).items():
            assert torch.equal(saved[name], tensor.to(saved_dtype))


def test_the_same_seed_makes_the_same_weights():
    state = torch.get_rng_state()
    one, other, third = kit.model(), kit.model(), kit.model(seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    name = "model.embed_tokens.weight"
    assert torch.equal(kit.weights(one)[name], kit.weights(other)[name])
    assert not torch.equal(kit.weights(one)[name], kit.weights(third)[name])


def checkpoint(tmp_path: Path) -> Path:
    kit.model(architecture=UNTIED).save(str(tmp_path))()
    return tmp_path


def rewrite(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def assert_rejected(path: Path, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        kit.model(architecture=None, path=str(path))


def test_wrong_tensors_of_a_checkpoint_are_named(tmp_path):
    path = checkpoint(tmp_path)
    rewrite(path, lambda tensors: tensors.pop("lm_head.weight"))
    assert_rejected(path, "lacks lm_head.weight")
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3, 32)}))
    assert_rejected(path, "tensors of other shapes than its config says: lm_head.weight")
    good = torch.zeros(kit.VOCAB, 32)
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": good, "model.extra": torch.zeros(1)}))
    assert_rejected(path, "has tensors that the model does not know: model.extra")


def test_a_directory_that_is_not_a_checkpoint_is_rejected(tmp_path):
    assert_rejected(tmp_path / "none", "not an HF checkpoint: it has no config.json")
    path = checkpoint(tmp_path)
    (path / "model.safetensors").unlink()
    assert_rejected(path, "has no readable weights")
    (path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert_rejected(path, "'vit' is not a causal language model")


def test_wrong_settings_are_rejected():
    for changes, message in (
        ({"architecture": None}, "'actor': it has neither a path nor an architecture"),
        ({"architecture": {"vocab_size": 3}}, "needs a model_type"),
        ({"architecture": {"model_type": "qwen22"}}, "no architecture of model_type 'qwen22'"),
        ({"head": "values"}, "head 'values' is not one of.*did you mean 'value'"),
        ({"device": "tpu"}, "device 'tpu' is not one of cpu, cuda"),
    ):
        with pytest.raises(BackendError, match=message):
            kit.model(**changes)


def test_models_that_packing_would_change_are_rejected():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(BackendError, match="'dynamic' rotary embeddings"):
        kit.model(architecture=kit.ARCHITECTURE | {"rope_parameters": rope})
    cohere = {k: v for k, v in kit.ARCHITECTURE.items() if k != "model_type"} | {"model_type": "cohere"}
    with pytest.raises(BackendError, match=r"transforms its logits \(logit_scale\)"):
        kit.model(architecture=cohere)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "olmo2"])
def test_other_architectures(model_type):
    changes = {"model_type": model_type, "head_dim": 8, "sliding_window": None}
    backend = kit.model(architecture=kit.ARCHITECTURE | changes)
    (result,) = backend.infer(kit.LOGPROBS, [BATCH])
    ids = BATCH.columns["input_ids"].values
    backend._model.set_attn_implementation("eager")
    for start, end in zip(BATCH.offsets, BATCH.offsets[1:], strict=False):
        x = torch.tensor(ids[start:end])
        with torch.no_grad():
            logprobs = torch.log_softmax(backend._model(x[None]).logits[0, :-1], -1)
        wanted = logprobs.gather(1, x[1:, None])[:, 0].numpy()
        mask = BATCH.columns["loss_mask"].values[start + 1 : end]
        got = result.columns["result"].values[start + 1 : end]
        np.testing.assert_allclose(got, wanted * mask, atol=1e-5)
