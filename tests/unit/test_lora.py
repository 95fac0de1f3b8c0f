"""Adapters: they compute as peft's do, train alone, can be turned off, and are saved as peft saves them."""

import dataclasses
from importlib.util import find_spec

import family_kit
import numpy as np
import peft_kit
import pytest
import torch
import torch_kit as kit
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from hflow.base.errors import BackendError, RunError
from hflow.config.schema import LoraConfig
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import SamplingParams
from hflow.launch.checkpoints.merged import merge_adapter
from hflow.models.adapter import adapter_weights, add_magnitudes
from hflow.models.dtypes import DTYPES
from hflow.planner.plan.request import trained_shape
from hflow.shapes.architectures import read_shape
from hflow.shapes.model_shape import EXPERT_TARGETS, tensors
from hflow.training.interface import TrainShard
from hflow.types.tensor_slices import Block, slices_within, whole_box
from hflow.weights.adapters import MergedWeights, merge
from hflow.weights.buckets import IncomingTensor
from hflow.weights.checksum import weights_checksum
from hflow.weights.incoming import IncomingWeights

LORA = LoraConfig(r=4, alpha=8)
VARIANTS = {
    "lora": LORA,
    "rslora": dataclasses.replace(LORA, rslora=True),
    "dora": dataclasses.replace(LORA, dora=True),
    "outer": dataclasses.replace(LORA, targets=("all-linear", "embed_tokens", "lm_head")),
    "experts": dataclasses.replace(LORA, targets=("all-linear", *EXPERT_TARGETS)),
    "downs of experts": dataclasses.replace(LORA, targets=("all-linear", EXPERT_TARGETS[1])),
}
if find_spec("bitsandbytes") is not None:
    VARIANTS["rounded"] = dataclasses.replace(LORA, base="nf4")
    VARIANTS["rounded dora"] = dataclasses.replace(LORA, base="nf4", dora=True)
BATCH = kit.make_batch(kit.LENGTHS)
OPTIONS = {"max_model_len": 64}
CALL, VALUES = kit.CALLS["token-mean"], kit.call(lambda out: out.values, "token", [])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a checkpoint of the base model."""
    path = tmp_path_factory.mktemp("base")
    kit.with_biases(kit.model()).save(str(path))()
    return str(path)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """Return a checkpoint of a base model with an output matrix of its own."""
    path = tmp_path_factory.mktemp("untied")
    kit.model(architecture=kit.ARCHITECTURE | {"tie_word_embeddings": False}).save(str(path))()
    return str(path)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Return a checkpoint of a base model with experts in all layers but the first one."""
    path = tmp_path_factory.mktemp("mixed")
    kit.model(architecture=kit.MIXED).save(str(path))()
    return str(path)


@pytest.fixture(params=VARIANTS)
def variant(request, base, untied, mixed):
    """Return settings of adapters, and a base that can have them."""
    others = {"outer": untied, "experts": mixed, "downs of experts": mixed}
    return VARIANTS[request.param], others.get(request.param, base)


def computed_with(lora, base, tmp_path, dtype="fp32"):
    """Return a checkpoint of the weights that adapters are beside: rounded ones, by bitsandbytes itself."""
    if lora.base is None:
        return base
    functional = pytest.importorskip("bitsandbytes.functional")
    module = AutoModelForCausalLM.from_pretrained(base, dtype=DTYPES[dtype])
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("_proj.weight"):
                packed = functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
                weight.copy_(functional.dequantize_4bit(*packed))
    module.save_pretrained(tmp_path / "rounded")
    return str(tmp_path / "rounded")


def adapted(base, **changes):
    return kit.model(**{"lora": LORA, "path": base, "architecture": None} | changes)


def logprobs(backend):
    (result,) = backend.infer(kit.LOGPROBS, [BATCH])
    return result.columns["result"].values


def whole_model(path):
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


def frozen(settings):
    return dataclasses.replace(settings, name="ref", lora=None, trainable=False)


def test_forward_and_gradients_are_those_of_peft(variant, tmp_path):
    """The log-probs and the gradient of their sum, with the same random adapters in peft's own model."""
    lora, base = variant
    backend = adapted(base, lora=lora)
    theirs = peft_kit.twin(backend, computed_with(lora, base, tmp_path), lora)
    named = peft_kit.adapters(theirs)
    batch = BATCH.take([4])
    wanted = peft_kit.learned_logprobs(theirs, batch)
    (result,) = backend.infer(kit.LOGPROBS, [batch])
    learned = result.columns["result"].values[batch.columns["loss_mask"].values]
    np.testing.assert_allclose(learned, wanted.detach(), atol=1e-5)
    (-wanted.sum()).backward()
    norm = torch.nn.utils.get_total_norm([x.grad for x in named.values()])
    gradients = []
    step, optimizer = backend._optimizer.step, backend._optimizer
    names = {x: name for name, x in adapter_weights(backend._model).items()}
    optimizer.step = lambda norm: (gradients.extend(x.grad.clone() for x in optimizer._weights), step(norm))
    nll = kit.call(lambda out: -out.logprobs, "token", [], reduce="token-sum/1")
    metrics = backend.train(nll, [TrainShard((batch,))], 0)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    ours = peft_kit.as_named_by_peft(
        {names[x]: gradient for x, gradient in zip(optimizer._weights, gradients, strict=True)}, lora
    )
    for name, x in named.items():
        torch.testing.assert_close(ours[name], x.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_only_adapters_are_trained_and_they_can_be_turned_off(variant, dtype, tmp_path):
    lora, base = variant
    backend = adapted(base, dtype=dtype, lora=lora)
    whole = computed_with(lora, base, tmp_path, dtype)
    plain = logprobs(kit.model(path=whole, architecture=None, dtype=dtype, trainable=False))
    np.testing.assert_array_equal(logprobs(backend), plain)  # B is 0
    ref = backend.share_weights(frozen(backend.settings))
    backend.train(CALL, kit.whole(BATCH), 0)
    assert np.abs(logprobs(backend) - plain).max() > 1e-3
    np.testing.assert_array_equal(logprobs(ref), plain)
    before = kit.weights(backend)
    backend.train(CALL, kit.whole(BATCH), 1)
    assert all(not torch.equal(x, before[name]) for name, x in kit.weights(backend).items())
    with pytest.raises(BackendError, match="frozen"):
        ref.train(CALL, kit.whole(BATCH), 1)
    stored = {x.dtype for name, x in backend._model.named_parameters() if ".lora_" not in name}
    assert stored == {torch.bfloat16 if dtype == "bf16" else torch.float32}


def test_a_saved_adapter_loads_in_peft_and_merges(variant, tmp_path):
    lora, base = variant
    backend = adapted(base, lora=dataclasses.replace(lora, save_merged=True))
    backend.train(CALL, kit.whole(BATCH), 0)
    backend.save(str(tmp_path))()
    whole = computed_with(lora, base, tmp_path)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(whole), tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    named = peft_kit.as_named_by_peft(kit.weights(backend), lora)
    names = (f"base_model.model.{name}" for name in named)
    assert saved.keys() == {name.replace("_vector.weight", "_vector") for name in names}
    assert saved.keys() == get_peft_model_state_dict(theirs, save_embedding_layers=False).keys()
    merged = theirs.merge_and_unload().state_dict()
    for name, x in whole_model(tmp_path / "merged").items():
        torch.testing.assert_close(x, merged[name], atol=1e-6, rtol=0)
    again = kit.model(path=str(tmp_path / "merged"), architecture=None, trainable=False)
    np.testing.assert_allclose(logprobs(again), logprobs(backend), atol=1e-5)
    merge_adapter(tmp_path, tmp_path / "exported")
    for name, x in whole_model(tmp_path / "exported").items():
        torch.testing.assert_close(x, merged[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mixtral"])
def test_experts_of_other_families_are_saved_and_merged_as_peft_does(family, tmp_path):
    """With dense layers, shared experts and biases of routers, which the merged model has, too."""
    kit.model(architecture=family_kit.architecture(family)).save(str(tmp_path / "base"))()
    lora = dataclasses.replace(VARIANTS["experts"], save_merged=True)
    backend = adapted(str(tmp_path / "base"), lora=lora)
    shape = trained_shape(read_shape(backend._model.config.to_dict()), lora)
    assert {x.name: x.shape for x in tensors(shape)} == {n: x.shape for n, x in kit.weights(backend).items()}
    backend.train(CALL, kit.whole(BATCH), 0)
    backend.save(str(tmp_path / "saved"))()
    merge_adapter(tmp_path / "saved", tmp_path / "exported")
    before, merged = whole_model(tmp_path / "base"), whole_model(tmp_path / "exported")
    for name, x in whole_model(tmp_path / "saved" / "merged").items():
        torch.testing.assert_close(x, merged[name], atol=1e-6, rtol=0)
        assert torch.equal(x, before[name]) == ("_proj" not in name or name.endswith("bias"))
    again = kit.model(path=str(tmp_path / "saved" / "merged"), architecture=None, trainable=False)
    np.testing.assert_allclose(logprobs(again), logprobs(backend), atol=1e-4)


def test_resuming_restores_adapters_and_moments(variant, tmp_path):
    lora, base = variant
    backend = adapted(base, lora=lora)
    backend.train(CALL, kit.whole(BATCH), 0)
    backend.save_shards(str(tmp_path / "shards"))()
    again = adapted(base, lora=lora, seed=9)
    again.load_shards(str(tmp_path / "shards"))
    wanted = backend.train(CALL, kit.whole(BATCH), 1), kit.weights(backend)
    assert again.train(CALL, kit.whole(BATCH), 1) == wanted[0]
    for name, x in kit.weights(again).items():
        assert torch.equal(x, wanted[1][name])


def test_the_head_of_a_critic_is_trained_with_its_adapters(base, tmp_path):
    critic = adapted(base, head="value")
    before = kit.weights(critic)
    assert {name for name in before if ".lora_" not in name} == {"value_head.weight", "value_head.bias"}
    critic.train(kit.VALUE, kit.whole(BATCH), 0)
    critic.train(kit.VALUE, kit.whole(BATCH), 1)
    assert all(not torch.equal(x, before[name]) for name, x in kit.weights(critic).items())
    critic.save(str(tmp_path))()
    critic.save_shards(str(tmp_path / "shards"))()
    assert (tmp_path / "value_head.safetensors").is_file()
    merge_adapter(tmp_path, tmp_path / "merged")
    whole = kit.model(path=str(tmp_path / "merged"), architecture=None, head="value", trainable=False)
    found, wanted = (
        backend.infer(VALUES, [BATCH])[0].columns["result"].values for backend in (whole, critic)
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    again = adapted(base, head="value", seed=9)
    again.load_shards(str(tmp_path / "shards"))
    for name, x in kit.weights(critic).items():
        assert torch.equal(kit.weights(again)[name], x)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_draws_from_the_adapted_model(variant, dtype):
    """Log-probs are those of the trainer, for an engine with its own weights and one with the trainer's."""
    lora, base = variant
    backend = adapted(base, dtype=dtype, lora=lora)
    backend.train(CALL, kit.whole(BATCH), 0)
    module = backend.shared_module()
    assert (module is not None) == (dtype == "fp32")
    own = EmbeddedEngine(backend.settings, {"max_model_len": 64})
    own.load_weights([IncomingWeights.of_tensors(backend.weights)], 1)
    engines = (
        [own] if module is None else [own, EmbeddedEngine(backend.settings, {"max_model_len": 64}, module)]
    )
    for engine in engines:
        engine.add(0, BATCH.columns["input_ids"].values[:3].tolist(), SamplingParams(max_tokens=9, seed=1))
        while engine.num_unfinished:
            finished = engine.step()
        ((_, result),) = finished
        ids = np.array([*BATCH.columns["input_ids"].values[:3], *result.ids])
        batch = kit.make_batch([12])
        batch.columns["input_ids"].values[:] = ids
        (trainer,) = backend.infer(kit.LOGPROBS, [batch])
        atol = 1e-5 if dtype == "fp32" else 0.05
        np.testing.assert_allclose(trainer.columns["result"].values[4:], result.logprobs[1:], atol=atol)


def drawn(engine, seed):
    """Return tokens and log-probs of three requests."""
    for i in range(3):
        prompt = BATCH.columns["input_ids"].values[i : i + 3].tolist()
        engine.add(i, prompt, SamplingParams(max_tokens=9, seed=seed + i))
    found = {}
    while engine.num_unfinished:
        found |= {i: (result.ids, result.logprobs) for i, result in engine.step()}
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_engines_on_one_base_draw_as_with_weights_of_their_own(base, dtype):
    """Two policies and the base itself; new adapters of one change no other."""
    alice = adapted(base, dtype=dtype)
    settings = dataclasses.replace(alice.settings, name="bob", seed=7, lora=LoraConfig(r=2, alpha=8))
    bob, plain = alice.share_weights(settings), frozen(alice.settings)
    alone = [EmbeddedEngine(one, OPTIONS) for one in (alice.settings, settings, plain)]
    first = EmbeddedEngine(alice.settings, OPTIONS)
    others = [EmbeddedEngine(one, OPTIONS, base=first) for one in (settings, plain)]
    together = [first, *others]
    places = {x.data_ptr() for name, x in first._module.named_parameters() if ".lora_" not in name}
    for engine in others:
        held = {x.data_ptr() for name, x in engine._module.named_parameters() if ".lora_" not in name}
        assert held == places
    before = drawn(first, 0)
    for step, (index, trainer) in enumerate([(0, alice), (1, bob), (0, alice)]):
        trainer.train(CALL, kit.whole(BATCH), step)
        for engines in (alone, together):
            loaded = engines[index].load_weights([IncomingWeights.of_tensors(trainer.weights)], step)
            assert loaded.checksums == (weights_checksum(dict(trainer.weights())),)
        for i in range(3):
            assert drawn(together[i], i) == drawn(alone[i], i)
    assert drawn(first, 0) != before
    assert drawn(others[0], 0) != before


def test_merging_by_hand():
    base = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    a, b = torch.tensor([[1.0, 10.0]]), torch.tensor([[2.0], [0.0]])
    assert torch.equal(merge(base, a, b, 0.5), torch.tensor([[2.0, 12.0], [3.0, 4.0]]))


def test_merging_with_magnitudes_by_hand():
    """V is [[3, 4], [6, 8]], whose rows have lengths 5 and 10."""
    base, a = torch.tensor([[1.0, 2.0], [2.0, 4.0]]), torch.tensor([[1.0, 1.0]])
    b, magnitude = torch.tensor([[4.0], [8.0]]), torch.tensor([10.0, 1.0])
    wanted = torch.tensor([[6.0, 8.0], [0.6, 0.8]])
    torch.testing.assert_close(merge(base, a, b, 0.5, magnitude), wanted)
    squares = torch.tensor([25.0, 100.0])  # over both columns, of which each rank has one
    halves = [merge(base[:, [i]], a[:, [i]], b, 0.5, magnitude, lambda own: squares) for i in (0, 1)]
    torch.testing.assert_close(torch.cat(halves, 1), wanted)


def test_a_step_with_magnitudes_by_hand():
    """One matrix, with the gradient of equation 6 of the paper: lengths of rows are constants."""
    layer = nn.Linear(2, 1, bias=False)
    model = nn.Sequential(layer)
    inject_adapter_in_model(PeftConfig(r=1, lora_alpha=1, target_modules=["0"]), model, "default")
    add_magnitudes(model)
    adapter = model[0]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0]]))
        adapter.lora_A["default"].weight.copy_(torch.tensor([[1.0, 1.0]]))
        adapter.lora_B["default"].weight.fill_(2.0)
        adapter.lora_magnitude_vector["default"].weight.fill_(10.0)
    output = model(torch.tensor([[1.0, 0.0]]))
    output.backward()
    assert output.item() == pytest.approx(10 * 3 / 5)  # V is [3, 4], of length 5
    assert adapter.lora_magnitude_vector["default"].weight.grad.item() == pytest.approx(3 / 5)
    assert adapter.lora_B["default"].weight.grad.item() == pytest.approx(10 / 5)


def test_unknown_targets_are_named(base, mixed):
    with pytest.raises(BackendError, match=r"no module 'q_prj'; did you mean 'q_proj'\?"):
        adapted(base, lora=LoraConfig(targets=("q_prj",)))
    with pytest.raises(BackendError, match=r"no module 'experts\.down_proj'"):
        adapted(base, lora=LoraConfig(targets=("experts.down_proj",)))
    with pytest.raises(BackendError, match=r"peft reads no magnitudes of down_proj in a model with experts"):
        adapted(mixed, lora=LoraConfig(r=4, dora=True))


class _Needed(IncomingWeights):
    """The parts of adapters that a rank needs: rows of q's B, and columns of down's A."""

    def __init__(self, backend, rank, num_ranks):
        super().__init__(None)
        self.backend, self.rank, self.num_ranks = backend, rank, num_ranks

    def __iter__(self):
        axes = {("q_proj", "lora_B"): 0, ("down_proj", "lora_A"): 1}
        for name, x in self.backend.weights():
            axis, box = axes.get(tuple(name.split(".")[-3:-1])), list(whole_box(tuple(x.shape)))
            if axis is not None:
                size = x.shape[axis] // self.num_ranks
                box[axis] = (self.rank * size, self.rank * size + size)
            at = slices_within(tuple(box), whole_box(tuple(x.shape)))
            partly = torch.full_like(x, torch.nan)
            partly[at] = x[at]
            yield IncomingTensor(name, partly, (tuple(box),), (0,))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_merges_its_part_of_each_tensor(base, tmp_path, num_ranks):
    """Rows of one matrix and columns of another, as tensor ranks hold them; others stay as they are."""
    backend = adapted(base, lora=dataclasses.replace(LORA, save_merged=True))
    backend.train(CALL, kit.whole(BATCH), 0)
    backend.save(str(tmp_path))()
    whole, merged = load_file(f"{base}/model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    names = {"q_proj": 0, "down_proj": 1}
    for rank in range(num_ranks):
        held = {}
        for name, x in whole.items():
            axis = names.get(name.split(".")[-2])
            size = x.shape[axis or 0] // num_ranks
            span = (rank * size, rank * size + size) if axis is not None else (0, x.shape[0])
            box = tuple(span if i == (axis or 0) else (0, n) for i, n in enumerate(x.shape))
            held[name] = Block(name, tuple(x.shape), box, x[slices_within(box, whole_box(tuple(x.shape)))])
        incoming = IncomingWeights.of_tensors(backend.weights)
        for adapters in (incoming, _Needed(backend, rank, num_ranks)):
            arrived = MergedWeights(adapters, held, LORA.scale, torch.device("cpu"))
            for tensor in arrived:
                (box,) = tensor.boxes
                at = slices_within(box, whole_box(tuple(tensor.tensor.shape)))
                torch.testing.assert_close(tensor.tensor[at], merged[tensor.name][at], atol=1e-6, rtol=0)
            if adapters is incoming:
                assert arrived.checksum == weights_checksum(dict(backend.weights()))
        if num_ranks > 1:
            with pytest.raises(RunError, match=r"of model.layers.0.*lora_.* has not arrived, only"):
                list(MergedWeights(_Needed(backend, 1 - rank, 2), held, LORA.scale, torch.device("cpu")))
        del held["model.layers.0.self_attn.q_proj.weight"]
        with pytest.raises(RunError, match=r"adapter of model.layers.0.self_attn.q_proj.weight, of which"):
            list(MergedWeights(incoming, held, LORA.scale, torch.device("cpu")))


def test_an_engine_merges_its_rows_of_every_expert(mixed, tmp_path):
    """Tensor ranks divide the rows F: of gates and ups, which have one A, and of the columns of downs."""
    backend = adapted(mixed, lora=VARIANTS["experts"])
    backend.train(CALL, kit.whole(BATCH), 0)
    whole, scale = kit.weights(adapted(mixed, lora=None)), LORA.scale
    adapters = kit.weights(backend)
    wanted = {}
    for path in (f"model.layers.{layer}.mlp.experts." for layer in (1, 2)):
        a = adapters[f"{path}gate_up_proj.lora_A.weight"]
        gate, up = (adapters[f"{path}{x}_proj.lora_B.weight"] for x in ("gate", "up"))
        down = adapters[f"{path}down_proj.lora_B.weight"] @ adapters[f"{path}down_proj.lora_A.weight"]
        for name, part in (("gate", gate @ a), ("up", up @ a), ("down", down)):
            wanted[f"{path}{name}_proj.weight"] = whole[f"{path}{name}_proj.weight"] + scale * part
    for rank in (0, 1):
        held = {}
        for name, x in whole.items():
            box, axis = list(whole_box(tuple(x.shape))), 2 if "down" in name else 1
            if name in wanted:
                box[axis] = (8 * rank, 8 * rank + 8)
            at = slices_within(tuple(box), whole_box(tuple(x.shape)))
            held[name] = Block(name, tuple(x.shape), tuple(box), x[at])
        incoming = IncomingWeights.of_tensors(backend.weights)
        for tensor in MergedWeights(incoming, held, scale, torch.device("cpu")):
            (box,) = tensor.boxes
            at = slices_within(box, whole_box(tuple(tensor.tensor.shape)))
            if tensor.name in wanted:
                torch.testing.assert_close(tensor.tensor[at], wanted[tensor.name][at], atol=1e-6, rtol=0)
                assert not torch.equal(tensor.tensor[at], whole[tensor.name][at])
