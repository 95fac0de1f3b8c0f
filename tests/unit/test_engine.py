"""The embedded engine compared with Hugging Face's generate and forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import enable_progress_bar

from hflow.base.errors import BackendError, ConfigError
from hflow.engines.embedded import dense_decoder
from hflow.engines.embedded.dense_decoder import DenseDecoder
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.embedded.families import own_forward_objection
from hflow.engines.embedded.module import FreedParameters, build_module, load_in_place
from hflow.engines.embedded.packing import PromptGroup
from hflow.engines.interface import GenerationResult, SamplingParams
from hflow.engines.request import new_request
from hflow.models.settings import ModelSettings
from hflow.types.engine import SleepLevel
from hflow.weights.incoming import IncomingWeights

VOCAB = 32
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
ARCHITECTURES = {
    "qwen2": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", **SIZES, "num_key_value_heads": 4},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 16, "num_key_value_heads": 1},
    "mistral": {
        "model_type": "mistral",
        **SIZES,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    },
    "biases": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
}
NEVER = SamplingParams(max_tokens=20, temperature=0.0)
PROMPTS = [[1, 5, 6], [1, 9, 9, 4, 7, 11, 3, 8], [7], list(range(3, 31)) * 2, [1, 5, 6]]


def settings(name: str = "qwen2", **changes: object) -> ModelSettings:
    return ModelSettings(name="actor", architecture={**ARCHITECTURES[name], **changes}, seed=3)


def reference(name: str = "qwen2", seed: int = 3) -> torch.nn.Module:
    """The same weights in a plain Hugging Face model."""
    architecture = dict(ARCHITECTURES[name])
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def run(engine: EmbeddedEngine) -> dict[int, GenerationResult]:
    results = {}
    while engine.num_unfinished:
        results.update(engine.step())
    return results


def generate(
    engine: EmbeddedEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> dict[int, GenerationResult]:
    for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        engine.add(i, prompt, sampling)
    return run(engine)


@torch.no_grad()
def full_logprobs(
    model: torch.nn.Module, prompt: Sequence[int], ids: Sequence[int], temperature: float
) -> torch.Tensor:
    """Log-probs of `ids` after `prompt` by one full forward."""
    tokens = torch.tensor([[*prompt, *ids]])
    logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_hf_generate(name: str) -> None:
    model = reference(name)
    results = generate(EmbeddedEngine(settings(name)), PROMPTS, [NEVER] * len(PROMPTS))
    for i, prompt in enumerate(PROMPTS):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert results[i].ids == tuple(out[0, len(prompt) :].tolist())
        torch.testing.assert_close(
            torch.tensor(results[i].logprobs),
            full_logprobs(model, prompt, results[i].ids, 1.0),
            atol=1e-4,
            rtol=0,
        )


@pytest.mark.first(8)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_logprobs_equal_a_full_forward_at_the_temperature(name: str, temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, max_tokens=12, seed=i) for i in range(len(PROMPTS))]
    results = generate(EmbeddedEngine(settings(name)), PROMPTS, params)
    for i, prompt in enumerate(PROMPTS):
        expected = full_logprobs(reference(name), prompt, results[i].ids, temperature)
        torch.testing.assert_close(torch.tensor(results[i].logprobs), expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_own_forward_equals_that_of_transformers_and_follows_its_weights() -> None:
    for name, architecture in ARCHITECTURES.items():
        engine, model = EmbeddedEngine(settings(name)), reference(name)
        for weight, target in zip(model.parameters(), engine._module.parameters(), strict=True):
            target.copy_(weight.uniform_(-0.3, 0.3))  # also biases, which are 0 at first
        members = (new_request(0, PROMPTS[1], NEVER, 99, VOCAB, None),)
        logits = engine._forward([PromptGroup(tuple(PROMPTS[1]), members)])
        expected = model(input_ids=torch.tensor([PROMPTS[1]])).logits[:, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)
        assert own_forward_objection(architecture, has_adapters=False) is None


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_arranged_matrices_change_no_result_and_follow_new_weights(
    name: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are the engine's own, or a trainer's, whose projections are not one tensor."""
    monkeypatch.setattr(dense_decoder, "MIN_ARRANGED", 1)
    params = [SamplingParams(max_tokens=10, seed=i) for i in range(len(PROMPTS))]
    found = []
    for after in (2, 1_000):
        monkeypatch.setattr(dense_decoder, "ARRANGED_AFTER", after)
        module = reference(name)
        engine = EmbeddedEngine(settings(name), {}, module if shares else None)
        made = [generate(engine, PROMPTS, params)]
        decoder = engine._decoder
        assert decoder is not None
        assert all((linear.arranged is not None) == (after == 2) for linear in decoder._linears())
        with torch.no_grad():
            for parameter in engine._module.parameters():
                parameter.mul_(1.01).add_(0.001)  # also biases, which are 0 at first
        engine.set_version(1)
        assert not any(linear.arranged for linear in decoder._linears())
        made.append(generate(engine, PROMPTS, params))
        found.append(made)
    for arranged, plain in zip(*found, strict=True):
        for i in range(len(PROMPTS)):
            assert arranged[i].ids == plain[i].ids
            assert arranged[i].logprobs == pytest.approx(plain[i].logprobs, abs=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_projections_are_one_product_each_without_a_copy_of_the_weights(name: str) -> None:
    """Parameters keep the names and shapes of transformers. A trainer's are left as they are."""
    engine, trainer = EmbeddedEngine(settings(name)), reference(name)
    expected = {key: tensor.shape for key, tensor in trainer.state_dict().items()}
    assert {key: tensor.shape for key, tensor in engine._module.state_dict().items()} == expected
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in engine._module.parameters()}
    assert sum(s.nbytes() for s in storages.values()) == sum(p.nbytes for p in engine._module.parameters())
    addresses = {key: tensor.data_ptr() for key, tensor in trainer.state_dict().items()}
    sharing = EmbeddedEngine(settings(name), {}, trainer)
    assert {key: tensor.data_ptr() for key, tensor in sharing._module.state_dict().items()} == addresses
    for module, num_products in ((engine._module, 1), (trainer, 3)):
        (layer, _) = DenseDecoder(module)._layers
        assert len(layer.projections.joined.parts) == num_products
        assert len(layer.gate_up.parts) == min(num_products, 2)


def test_other_models_run_through_the_modules_of_transformers(caplog: pytest.LogCaptureFixture) -> None:
    EmbeddedEngine(settings("llama", hidden_act="gelu"))
    assert "its activation is gelu" in caplog.text
    assert "olmo2" in str(own_forward_objection({"model_type": "olmo2"}, has_adapters=False))
    assert own_forward_objection(ARCHITECTURES["qwen2"], has_adapters=True) == "it has adapters"


def test_members_of_a_group_share_a_prompt_and_differ_by_seed() -> None:
    params = [SamplingParams(max_tokens=10, seed=i) for i in range(8)]
    results = generate(EmbeddedEngine(settings()), [PROMPTS[1]] * 8, params)
    assert len({results[i].ids for i in range(8)}) == 8
    for i in range(8):
        expected = full_logprobs(reference(), PROMPTS[1], results[i].ids, 1.0)
        torch.testing.assert_close(torch.tensor(results[i].logprobs), expected, atol=1e-4, rtol=0)


def test_results_do_not_depend_on_slots_order_or_arrival() -> None:
    prompts = [[1 + (i * 7 + j) % 30 for j in range(1 + i % 9)] for i in range(24)]
    params = [SamplingParams(max_tokens=3 + (5 * i) % 17, seed=100 + i) for i in range(24)]
    together = generate(EmbeddedEngine(settings()), prompts, params)
    few_slots = generate(EmbeddedEngine(settings(), {"max_running": 3}), prompts, params)
    tiny_budget = generate(EmbeddedEngine(settings(), {"max_tokens_per_step": 5}), prompts, params)
    late = EmbeddedEngine(settings(), {"max_running": 7})
    arrived: dict[int, GenerationResult] = {}
    for i in reversed(range(24)):
        late.add(i, prompts[i], params[i])
        arrived.update(late.step())
    arrived.update(run(late))
    for other in (few_slots, tiny_budget, arrived):
        assert {i: g.ids for i, g in other.items()} == {i: g.ids for i, g in together.items()}
        for i, result in other.items():
            assert result.logprobs == pytest.approx(together[i].logprobs, abs=1e-5)


def test_sequences_of_all_lengths_run_together() -> None:
    """They outgrow their bands and change slots; some are interrupted and continue with long prompts."""
    prompts = [[1 + (i * 7 + j) % 30 for j in range(1 + (37 * i) % 110)] for i in range(16)]
    params = [SamplingParams(max_tokens=5 + (11 * i) % 45, seed=100 + i) for i in range(16)]
    engine = EmbeddedEngine(settings(), {"max_running": 9})
    for i in range(16):
        engine.add(i, prompts[i], params[i])
    results = dict(pair for _ in range(20) for pair in engine.step())
    engine.set_version(1)
    results |= run(engine)
    alone = generate(EmbeddedEngine(settings(), {"max_running": 1}), prompts, params)
    model = reference()
    for i in range(16):
        assert results[i].ids == alone[i].ids
        expected = full_logprobs(model, prompts[i], results[i].ids, 1.0)
        torch.testing.assert_close(torch.tensor(results[i].logprobs), expected, atol=1e-4, rtol=0)


def test_finished_requests_leave_and_waiting_ones_enter_at_every_step() -> None:
    engine = EmbeddedEngine(settings(), {"max_running": 4})
    for i in range(10):
        engine.add(i, [1, 3 + i], SamplingParams(max_tokens=1 + i % 3, seed=i))
    finished, busy = [], []
    while engine.num_unfinished:
        waiting = engine.num_unfinished - engine.num_running
        finished += [i for i, _ in engine.step()]
        busy.append((waiting, engine.num_running))
    assert sorted(finished) == list(range(10))
    assert all(running <= 4 for _, running in busy)
    assert len(busy) == 6, "19 tokens on 4 slots, never idle while something waits"


def test_interrupted_requests_draw_the_same_tokens_when_resumed() -> None:
    params = [SamplingParams(max_tokens=15, seed=i) for i in range(len(PROMPTS))]
    whole = generate(EmbeddedEngine(settings()), PROMPTS, params)
    engine = EmbeddedEngine(settings(), {"max_running": 3})
    for i, prompt in enumerate(PROMPTS):
        engine.add(i, prompt, params[i])
    for _ in range(4):
        assert engine.step() == []
    partial = dict(engine.interrupt())
    assert engine.num_unfinished == 0
    assert [len(partial[i].ids) for i in range(5)] == [4, 4, 4, 0, 0]
    assert {p.stop_reason for p in partial.values()} == {"abort"}
    engine.set_version(1)
    for i, part in partial.items():
        rest = SamplingParams(max_tokens=15 - len(part.ids), seed=i)
        engine.add(i, [*PROMPTS[i], *part.ids], rest)
    for i, result in run(engine).items():
        assert partial[i].ids + result.ids == whole[i].ids
        assert partial[i].logprobs + result.logprobs == pytest.approx(whole[i].logprobs, abs=1e-4)
        assert partial[i].versions + result.versions == (0,) * len(partial[i].ids) + (1,) * len(result.ids)


def test_versions_and_weights_are_exact_across_a_load() -> None:
    old, new = reference(), reference(seed=4)
    engine = EmbeddedEngine(settings(), {"max_running": 3})
    params = [SamplingParams(max_tokens=10, seed=i) for i in range(len(PROMPTS))]
    for i, prompt in enumerate(PROMPTS):
        engine.add(i, prompt, params[i])
    for _ in range(4):
        engine.step()
    engine.load_weights([IncomingWeights.of_tensors(new.named_parameters)], 7)
    for i, result in run(engine).items():
        num_old = 4 if i < 3 else 0
        assert result.versions == (0,) * num_old + (7,) * (10 - num_old)
        prompt = PROMPTS[i]
        before = full_logprobs(old, prompt, result.ids[:num_old], 1.0) if num_old else torch.zeros(0)
        after = full_logprobs(new, [*prompt, *result.ids[:num_old]], result.ids[num_old:], 1.0)
        expected = torch.cat((before, after))
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-4, rtol=0)


def test_loading_rejects_wrong_names_wrong_shapes_and_missing_tensors() -> None:
    engine = EmbeddedEngine(settings())
    weights = dict(reference().named_parameters())
    with pytest.raises(BackendError, match=r"lacks; did you mean 'model.norm.weight'"):
        engine.load_weights([IncomingWeights.of_tensors(lambda: [("model.norm.weigth", torch.zeros(32))])], 1)
    with pytest.raises(BackendError, match=r"'model.norm.weight' of shape"):
        engine.load_weights([IncomingWeights.of_tensors(lambda: [("model.norm.weight", torch.zeros(31))])], 1)
    del weights["model.norm.weight"]
    with pytest.raises(BackendError, match=r"lack 1 tensors .* 'model.norm.weight'"):
        engine.load_weights([IncomingWeights.of_tensors(weights.items)], 1)
    assert engine.version == 0


def test_updates_of_shared_weights_take_effect_without_a_copy() -> None:
    trainer = reference(seed=9).train()
    engine = EmbeddedEngine(settings(), {}, trainer)
    assert trainer.config._attn_implementation != engine._module.config._attn_implementation
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(1.1)
    engine.set_version(1)
    (result,) = generate(engine, [PROMPTS[1]], [SamplingParams(max_tokens=8)]).values()
    assert result.versions == (1,) * 8
    expected = full_logprobs(trainer.eval(), PROMPTS[1], result.ids, 1.0)
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-4, rtol=0)
    with pytest.raises(BackendError, match="set_version"):
        engine.load_weights([IncomingWeights.of_tensors(trainer.named_parameters)], 2)


def test_a_step_keeps_gradients_of_shared_weights() -> None:
    trainer = reference()
    engine = EmbeddedEngine(settings(), {}, trainer)
    generate(engine, PROMPTS, [SamplingParams(max_tokens=2)] * len(PROMPTS))
    trainer(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in trainer.parameters())


def test_stop_ids_end_a_sequence_and_are_kept() -> None:
    free = generate(EmbeddedEngine(settings()), [PROMPTS[0]], [SamplingParams(max_tokens=20, seed=5)])[0]
    stop = free.ids[6]
    first = free.ids.index(stop)
    params = SamplingParams(max_tokens=20, seed=5, stop_ids=(stop, 77))
    stopped = generate(EmbeddedEngine(settings()), [PROMPTS[0]], [params])[0]
    assert (stopped.ids, stopped.stop_reason) == (free.ids[: first + 1], "stop")
    assert free.stop_reason == "length"


def test_stop_strings_end_a_sequence_also_across_a_resumption() -> None:
    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(ord("A") + i) for i in ids)

    def engine() -> EmbeddedEngine:
        return EmbeddedEngine(settings(), {}, None, decode)

    free = generate(engine(), [PROMPTS[0]], [SamplingParams(max_tokens=20, seed=5)])[0]
    text = decode(free.ids)
    stop = text[5:8]
    end = text.find(stop) + 3
    stopped = generate(engine(), [PROMPTS[0]], [SamplingParams(max_tokens=20, seed=5, stop=("none", stop))])[
        0
    ]
    assert (decode(stopped.ids), stopped.stop_reason) == (text[:end], "stop")
    resumed = SamplingParams(max_tokens=20 - end + 1, seed=5, stop=(stop,), num_resumed=end - 1)
    rest = generate(engine(), [[*PROMPTS[0], *free.ids[: end - 1]]], [resumed])[0]
    assert rest.ids == free.ids[end - 1 : end]
    with pytest.raises(BackendError, match="decode"):
        EmbeddedEngine(settings()).add(0, [1], SamplingParams(stop=("x",)))


def test_the_longest_sequence_ends_with_length() -> None:
    results = generate(
        EmbeddedEngine(settings(), {"max_model_len": 12}), [[1] * 8], [SamplingParams(max_tokens=50)]
    )
    assert (len(results[0].ids), results[0].stop_reason) == (4, "length")


@pytest.mark.parametrize("prompt", [[], [1] * 12])
def test_empty_and_too_long_prompts_are_rejected(prompt: list[int]) -> None:
    with pytest.raises(BackendError, match="takes 1 to 11"):
        EmbeddedEngine(settings(), {"max_model_len": 12}).add(0, prompt, SamplingParams())


def test_tokens_outside_the_vocabulary_are_rejected() -> None:
    with pytest.raises(BackendError, match="token 32"):
        EmbeddedEngine(settings()).add(0, [1, 32], SamplingParams())


def test_cancelled_requests_have_no_result_and_do_not_change_others() -> None:
    params = [SamplingParams(max_tokens=10, seed=i) for i in range(6)]
    prompts = [[1, 4 + i] for i in range(6)]
    alone = generate(EmbeddedEngine(settings()), prompts, params)
    engine = EmbeddedEngine(settings(), {"max_running": 4})
    for i in range(6):
        engine.add(i, prompts[i], params[i])
    for _ in range(3):
        engine.step()
    engine.cancel(1)
    engine.cancel(5)
    engine.cancel(99)
    results = run(engine)
    assert sorted(results) == [0, 2, 3, 4]
    assert all(results[i].ids == alone[i].ids for i in results)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sleep_frees_an_accelerator_and_wake_resumes(device: str) -> None:
    params = [SamplingParams(max_tokens=10, seed=i) for i in range(2)]
    on_device = replace(settings(), device=device)
    whole = generate(EmbeddedEngine(on_device), PROMPTS[:2], params)
    engine = EmbeddedEngine(on_device)
    for i in range(2):
        engine.add(i, PROMPTS[i], params[i])
    engine.step()
    assert (held := engine.cache_bytes) > 0
    engine.sleep(SleepLevel.KEEP_WEIGHTS)
    assert engine.cache_bytes == (held if device == "cpu" else 0)
    engine.wake_weights()
    engine.wake_cache()
    assert {i: g.ids for i, g in run(engine).items()} == {i: g.ids for i, g in whole.items()}


@pytest.mark.parametrize("keep", [True, False])
def test_freed_parameters_keep_their_values_or_can_be_loaded_again(keep: bool) -> None:
    module = build_module(settings(), None).requires_grad_(False)
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    freed = FreedParameters(module.parameters(), keep)
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in module.parameters())
    freed.restore()
    if not keep:
        load_in_place(module, iter(expected.items()))
    torch.testing.assert_close(module.state_dict(), expected, rtol=0, atol=0)


def test_random_weights_in_bf16_are_drawn_in_fp32_as_by_a_trainer() -> None:
    module = build_module(replace(settings("llama"), dtype="bf16"), None)
    drawn = dict(reference("llama").named_parameters())
    for name, weight in module.named_parameters():
        assert torch.equal(weight, drawn[name].to(torch.bfloat16))


def test_bf16_generates_with_its_own_forward() -> None:
    bf16 = ModelSettings(name="actor", architecture=ARCHITECTURES["llama"], seed=3, dtype="bf16")
    results = generate(EmbeddedEngine(bf16), PROMPTS, [SamplingParams(max_tokens=6, seed=1)] * len(PROMPTS))
    model = reference("llama").bfloat16()
    for i, prompt in enumerate(PROMPTS):
        expected = full_logprobs(model, prompt, results[i].ids, 1.0).float()
        torch.testing.assert_close(torch.tensor(results[i].logprobs), expected, atol=0.15, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({"model_type": "mamba", "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1}, "Mamba"),
        ({"model_type": "bloom", "vocab_size": 32, "hidden_size": 32, "n_layer": 1, "n_head": 2}, "Bloom"),
        ({"model_type": "gemma2", **SIZES, "head_dim": 8}, "soft caps"),
        ({"model_type": "t5"}, "actor"),
        ({"model_type": "nonesuch"}, "nonesuch"),
    ],
)
def test_unsupported_architectures_are_rejected_by_name(
    architecture: dict[str, object], message: str
) -> None:
    with pytest.raises(BackendError, match=message) as caught:
        EmbeddedEngine(ModelSettings(name="actor", architecture=architecture))
    assert "\n" not in str(caught.value)


def test_diverged_weights_are_reported() -> None:
    engine = EmbeddedEngine(settings())
    broken = {name: torch.full_like(p, float("nan")) for name, p in reference().named_parameters()}
    engine.load_weights([IncomingWeights.of_tensors(broken.items)], 1)
    engine.add(0, [1], SamplingParams())
    with pytest.raises(BackendError, match="NaN"):
        engine.step()


@pytest.mark.parametrize("options", [{"max_runing": 3}, {"max_running": 0}])
def test_options_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"max_runing|at least 1"):
        EmbeddedEngine(settings(), options)


def test_a_checkpoint_is_read(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    model = reference()
    model.save_pretrained(tmp_path)
    capsys.readouterr()
    enable_progress_bar()
    engine = EmbeddedEngine(ModelSettings(name="actor", path=str(tmp_path)))
    assert capsys.readouterr().err == ""
    (result,) = generate(engine, [PROMPTS[1]], [SamplingParams(max_tokens=5)]).values()
    expected = full_logprobs(model, PROMPTS[1], result.ids, 1.0)
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-4, rtol=0)
    with pytest.raises(BackendError, match=r"model .actor.: .*not an HF checkpoint"):
        EmbeddedEngine(ModelSettings(name="actor", path=str(tmp_path) + "/none"))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-3), ("bf16", 0.2)])
def test_an_accelerator_draws_from_the_same_distribution(dtype: str, tolerance: float) -> None:
    engine = EmbeddedEngine(replace(settings("llama"), device="cuda", dtype=dtype))
    engine.load_weights([IncomingWeights.of_tensors(reference("llama").named_parameters)], 0)
    params = [SamplingParams(max_tokens=12, seed=i) for i in range(len(PROMPTS))]
    first = generate(engine, PROMPTS, params)
    engine.sleep(SleepLevel.KEEP_WEIGHTS)
    engine.wake_weights()
    engine.wake_cache()
    assert {i: g.ids for i, g in generate(engine, PROMPTS, params).items()} == {
        i: g.ids for i, g in first.items()
    }
    for i, prompt in enumerate(PROMPTS):
        expected = full_logprobs(reference("llama"), prompt, first[i].ids, 1.0)
        torch.testing.assert_close(torch.tensor(first[i].logprobs), expected, atol=tolerance, rtol=0)
