"""Adapters with megatron: they compute as peft's do, and train and are saved as by torch in one process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import megatron_twins as twins
import memory_kit
import numpy as np
import peft_kit
import pytest
import ranks
import torch
import torch_kit as kit
from late_megatron import megatron
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hflow.base.errors import BackendError
from hflow.config.schema import LoraConfig
from hflow.models.settings import RankPosition
from hflow.shapes.model_shape import EXPERT_TARGETS
from hflow.training.interface import TrainShard

FP32 = [name for name, twin in twins.ADAPTER_TWINS.items() if twin.dtype == "fp32"]
BF16 = [name for name, twin in twins.ADAPTER_TWINS.items() if twin.dtype == "bf16"]
SAVED = [name for name in FP32 if twins.NODES[twins.ADAPTER_TWINS[name].node][1]["lora"].save_merged]
EXPERTS = ("all-linear", *EXPERT_TARGETS)
OPTIONS = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "outer": {"targets": twins.OUTER},
    "experts": {"targets": EXPERTS},
    "downs of experts": {"targets": ("all-linear", EXPERT_TARGETS[1])},
}
BIASED = kit.ARCHITECTURE | {"model_type": "llama", "attention_bias": True, "mlp_bias": True}
BATCH = kit.make_batch(kit.LENGTHS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    twins.save_checkpoint(path / "checkpoint")
    ranks.start(twins.train_adapters, (str(path),), 4)
    return path


def adapted(base: Path, **changes):
    options = {"path": str(base), "architecture": None, "lora": LoraConfig(r=4, alpha=8)}
    settings = dataclasses.replace(kit.SETTINGS, **options | changes)
    return megatron("backend").MegatronModel(settings, RankPosition())


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return checkpoints: of a model that has a bias beside each matrix, and of two that others need."""
    architectures = {
        "lora": BIASED,
        "outer": kit.ARCHITECTURE | {"tie_word_embeddings": False},
        "experts": kit.MIXED,
    }
    made = {kind: tmp_path_factory.mktemp(kind) for kind in architectures}
    for kind, path in made.items():
        kit.with_biases(kit.model(architecture=architectures[kind])).save(str(path))()
    return dict.fromkeys(OPTIONS, made["lora"]) | made | {"downs of experts": made["experts"]}


@pytest.mark.parametrize("kind", OPTIONS)
def test_logits_and_gradients_are_those_of_peft(bases, kind):
    """The log-probs and the gradient of their sum, with the same random adapters in peft's own model."""
    base = bases[kind]
    backend = adapted(base, lora=LoraConfig(r=4, alpha=8, **OPTIONS[kind]))
    theirs = peft_kit.twin(backend, base, backend.settings.lora)
    named = peft_kit.adapters(theirs)
    batch = BATCH.take([4])
    logprobs = peft_kit.learned_logprobs(theirs, batch)
    (result,) = backend.infer(kit.LOGPROBS, [batch])
    learned = result.columns["result"].values[batch.columns["loss_mask"].values]
    np.testing.assert_allclose(learned, logprobs.detach(), atol=1e-5)
    (-logprobs.sum()).backward()
    gradients = {}
    optimizer = backend._optimizer
    norm = optimizer.gradient_norm

    def keep() -> float:
        named_parameters = backend._stage.module.named_parameters()
        values = {name: x.main_grad.clone() for name, x in named_parameters if x.requires_grad}
        gradients.update(megatron("weight_export").named_weights(backend._stage, values=values))
        return norm()

    optimizer.gradient_norm = keep
    nll = kit.call(lambda out: -out.logprobs, "token", [], reduce="token-sum/1")
    metrics = backend.train(nll, [TrainShard((batch,))], 0)
    for name, gradient in peft_kit.as_named_by_peft(gradients, backend.settings.lora).items():
        torch.testing.assert_close(gradient, named[name].grad, atol=1e-5, rtol=1e-4)
    wanted = torch.nn.utils.get_total_norm([x.grad for x in named.values()])
    assert metrics["grad_norm"] == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["lora", "dora", "outer", "experts"])
def test_adapters_can_be_turned_off(bases, dtype, kind):
    backend = adapted(bases[kind], dtype=dtype, lora=LoraConfig(r=4, alpha=8, **OPTIONS[kind]))
    frozen = dataclasses.replace(backend.settings, name="ref", lora=None, trainable=False)
    plain = logprobs(megatron("backend").MegatronModel(frozen, RankPosition()))
    np.testing.assert_array_equal(logprobs(backend), plain)  # B is 0
    ref = backend.share_weights(frozen)
    before = kit.weights(backend)
    for step in (0, 1):
        backend.train(kit.CALLS["token-mean"], kit.whole(BATCH), step)
    unmoved = [x for name, x in kit.weights(backend).items() if torch.equal(x, before[name])]
    assert all(dtype == "bf16" and x.dim() == 1 for x in unmoved)  # less than bf16 resolves
    changed = logprobs(backend)
    assert np.abs(changed - plain).max() > 1e-3
    np.testing.assert_array_equal(logprobs(ref), plain)
    np.testing.assert_array_equal(logprobs(backend), changed)
    with pytest.raises(BackendError, match="frozen"):
        ref.train(kit.CALLS["token-mean"], kit.whole(BATCH), 1)


def logprobs(backend) -> np.ndarray:
    (result,) = backend.infer(kit.LOGPROBS, [BATCH])
    return result.columns["result"].values


# ------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["lora", "dora", "outer", "experts"])
def test_the_plan_counts_what_is_allocated(kind, dtype):
    """To the byte, but for the alignment of gradients in their buffers."""
    architecture = (memory_kit.MIXED if kind == "experts" else memory_kit.ARCHITECTURE) | {
        "vocab_size": 256,  # two times 128, so that it is not padded
        "tie_word_embeddings": False,
    }
    lora = LoraConfig(r=8, **OPTIONS[kind])
    settings = dataclasses.replace(kit.SETTINGS, architecture=architecture, lora=lora, dtype=dtype)
    backend = megatron("backend").MegatronModel(settings, RankPosition())
    rank = memory_kit.rank(memory_kit.shape_of(architecture), backend="megatron", dtype=dtype, lora=lora)
    planned, optimizer = memory_kit.named(megatron("memory").model_state(rank)), backend._optimizer
    weights = sum(x.nbytes for x in backend._stage.module.parameters())
    assert planned["weights"] + planned["adapters"] == weights
    held = sum(x.nbytes for x in optimizer.states())
    assert planned.get("fp32 weights", 0) + planned["optimizer"] == held
    gradients = sum(x.nbytes for x in optimizer.gradients())
    assert 0 <= gradients - planned["gradients"] <= 512 * len(backend._stage.parameters)


# ------------------------------------------------------------------------------- ranks
def results(directory: Path, name: str) -> list[tuple[list[dict], dict]]:
    """Metrics and weights of each rank."""
    num_ranks = twins.ADAPTER_TWINS[name].num_ranks
    return [torch.load(directory / f"{name}.{rank}.pt", weights_only=False) for rank in range(num_ranks)]


@pytest.mark.parametrize("name", FP32)
def test_training_equals_torch_in_one_process(directory, name):
    twins.assert_trains_as_torch(directory, name, twins.ADAPTER_TWINS[name])


@pytest.mark.parametrize("name", BF16)
def test_bf16_equals_torch_up_to_its_precision(directory, name):
    twin = twins.ADAPTER_TWINS[name]
    wanted = twins.expected(twin.node, "bf16", directory / "checkpoint")
    start = twins.initial_weights(twin.node, directory / "checkpoint")
    for _, weights in results(directory, name):
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        there, here = (
            torch.cat([(x[n].float() - start[n]).flatten() for n in start]) for x in (weights, wanted.weights)
        )
        assert torch.cosine_similarity(there, here, dim=0) > 0.95


@pytest.mark.parametrize("name", SAVED)
def test_files_are_those_of_torch(directory, tmp_path, name):
    """The adapter that any layout saves has the names and the configuration of torch's, and is merged."""
    saved, checkpoint = directory / f"{name} saved", directory / "checkpoint"
    changes = twins.settings(twins.Twin(twins.ADAPTER_TWINS[name].node), checkpoint)
    kit.model(**changes).save(str(tmp_path))()
    config, theirs = (json.loads((path / "adapter_config.json").read_text()) for path in (saved, tmp_path))
    assert config == theirs
    ours = load_file(saved / "adapter_model.safetensors")
    assert ours.keys() == load_file(tmp_path / "adapter_model.safetensors").keys()
    _, weights = results(directory, name)[0]
    for key, tensor in peft_kit.as_named_by_peft(weights, changes["lora"]).items():
        file_key = key.replace("_vector.weight", "_vector")
        assert torch.equal(ours[f"base_model.model.{file_key}"], tensor)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(changes["path"]), saved)
    wanted = model.merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(saved / "merged").state_dict()
    assert merged.keys() == wanted.keys()
    for key, tensor in merged.items():
        torch.testing.assert_close(tensor, wanted[key], atol=1e-6, rtol=0)
