"""Families with sliding windows, sinks, latent attention and others' experts: packed, generated and saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hflow.base.errors import BackendError, PlanError
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.embedded.families import own_forward_objection
from hflow.engines.interface import SamplingParams
from hflow.launch.planning.compile import compile_recipe
from hflow.models.attention_kernels import Reach, additive_mask, cached_attention, reaching_attention
from hflow.models.settings import ModelSettings
from hflow.planner.checks.unrunnable import builds
from hflow.planner.plan.traits import BACKENDS, ENGINES
from hflow.planner.weights.weight_slices import WeightSlice
from hflow.report.content import experts_line
from hflow.shapes.architectures import (
    FAMILIES,
    KNOWN_FAMILIES,
    PLANNED_FAMILIES,
    TITLES,
    UNSUPPORTED,
    read_shape,
)
from hflow.shapes.model_shape import tensors
from hflow.weights.incoming import IncomingWeights
from hflow.weights.outgoing import _SliceReader
from tests.kits import family_kit, torch_kit
from tests.kits.family_kit import ARCHITECTURES, architecture, logprobs, plain

PROMPTS = [[1, 5, 6], [1, 9, 9, 4, 7, 11, 3, 8], [7], list(range(3, 31)), [1, 5, 6]]


def trained(family: str) -> Any:
    backend = torch_kit.model(architecture=architecture(family))
    family_kit.vary(backend._model)
    return backend


def infer(backend: Any, batch: Any) -> np.ndarray:
    (result,) = backend.infer(torch_kit.LOGPROBS, [batch])
    return np.asarray(result.columns["result"].values)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_packed_logprobs_and_generated_ones_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Also after the weights were sent to an engine of its own, and after they were saved."""
    backend = trained(family)
    model = plain(backend._model)
    batch = torch_kit.make_batch([13, 5, 22, 9, 9, 17, 30, 3])
    learned = np.asarray(batch.columns["loss_mask"].values)
    found = infer(backend, batch)
    for first, last in zip(batch.offsets, batch.offsets[1:], strict=False):
        ids = [int(x) for x in batch.columns["input_ids"].values[first:last]]
        wanted = logprobs(model, ids).numpy()
        mask = learned[first + 1 : last]
        np.testing.assert_allclose(found[first + 1 : last][mask], wanted[mask], atol=3e-5)
    engine = EmbeddedEngine(ModelSettings(name="actor", architecture=architecture(family), seed=99))
    engine.load_weights([IncomingWeights.of_tensors(backend.weights)], 1)
    for i, prompt in enumerate(PROMPTS):
        engine.add(i, prompt, SamplingParams(temperature=1.0, max_tokens=12, seed=i))
    results = {}
    while engine.num_unfinished:
        results.update(engine.step())
    for i, prompt in enumerate(PROMPTS):
        wanted = logprobs(model, [*prompt, *results[i].ids])[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(results[i].logprobs), wanted, atol=3e-5, rtol=0)
    backend.save(str(tmp_path))()
    again = torch_kit.model(path=str(tmp_path), architecture=None)
    np.testing.assert_allclose(infer(again, batch)[learned], found[learned], atol=1e-6)


@pytest.mark.parametrize("family", sorted(ARCHITECTURES.keys() & {*KNOWN_FAMILIES}))
def test_a_trainer_holds_the_tensors_of_the_plan(family: str) -> None:
    """With biases of routers, which are sent in fp32 from models in bf16."""
    backend = torch_kit.model(architecture=architecture(family), dtype="bf16")
    shape = read_shape(architecture(family))
    assert shape is not None
    assert {block.tensor: block.shape for block in backend.blocks()} == {
        spec.name: spec.shape for spec in tensors(shape)
    }
    read = _SliceReader(backend)
    for block in backend.blocks():
        sent = read(WeightSlice(block.tensor, block.shape, block.box, 0))
        in_fp32 = block.tensor.endswith("e_score_correction_bias")
        assert sent.dtype == (torch.float32 if in_fp32 else torch.bfloat16)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "deepseek_v3"])
def test_gradients_equal_those_of_transformers(family: str) -> None:
    """The gradient of a sum of log-probs; of gpt-oss, the sinks' too."""
    backend = trained(family)
    model = plain(backend._model).train()
    lengths = [13, 5, 22]
    batch = torch_kit.make_batch(lengths)
    ids = [int(x) for x in batch.columns["input_ids"].values]
    mask = np.asarray(batch.columns["loss_mask"].values)
    start, total = 0, torch.zeros(())
    for length in lengths:
        x = torch.tensor([ids[start : start + length]])
        found = model(input_ids=x).logits[0, :-1].log_softmax(-1).gather(1, x[0, 1:, None])[:, 0]
        total = total - found[torch.from_numpy(mask[start + 1 : start + length])].sum()
        start += length
    total.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    call = torch_kit.call(lambda out: -out.logprobs, "token", [], reduce="token-sum/1")
    metrics = backend.train(call, [torch_kit.TrainShard((batch,))], 0)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-5)


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reach: Reach) -> torch.Tensor:
    """Attention of the last query of `[H, d]` over `[G, M, d]`, by the formula of the softmax."""
    rows = []
    for head, query in enumerate(q):
        group = head * len(k) // len(q)
        keys, values = k[group], v[group]
        first = 0 if reach.window is None else max(0, len(keys) - reach.window)
        scores = (keys[first:] @ query * 0.3).exp()
        sink = 0.0 if reach.sinks is None else reach.sinks[head].exp()
        rows.append((scores[:, None] * values[first:]).sum(0) / (scores.sum() + sink))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_and_sinks_are_those_of_the_formula(window: int | None, has_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, heads, 6, size, generator=generator) for heads, size in ((4, 8), (2, 8), (2, 5))
    )
    reach = Reach(window, torch.randn(4, generator=generator) if has_sinks else None)
    found = reaching_attention(q, k, v, 0.3, reach)
    for i in range(6):
        wanted = torch.stack([naive(q[s, :, i], k[s, :, : i + 1], v[s, :, : i + 1], reach) for s in (0, 1)])
        torch.testing.assert_close(found[:, :, i], wanted)
        mask = additive_mask(torch.tensor([i, i]), 6, torch.float32, window)
        torch.testing.assert_close(cached_attention(q[:, :, i], k, v, mask, 0.3, reach.sinks), wanted)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_queries", [5, 3])
def test_gradients_with_sinks_are_those_of_finite_differences(window: int | None, num_queries: int) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = (2, 4, num_queries, 8), (2, 2, 5, 8), (2, 2, 5, 8), (4,)
    inputs = [
        torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes
    ]
    mask = additive_mask(torch.arange(5 - num_queries, 5), 5, torch.float64)[:, 0, 0]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return reaching_attention(q, k, v, 0.3, Reach(window, sinks), mask)

    assert torch.autograd.gradcheck(attend, inputs)


def test_what_the_own_forward_pass_does_not_compute_runs_through_modules() -> None:
    window = {"model_type": "mistral", "sliding_window": 4}
    assert own_forward_objection(window, has_adapters=False) == "it has sliding windows"
    unused = {"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": False}
    assert own_forward_objection(unused, has_adapters=False) is None


def test_attention_that_is_neither_causal_nor_windowed_is_refused() -> None:
    both = architecture("gemma3_text") | {"use_bidirectional_attention": True}
    with pytest.raises(BackendError, match="attention to later tokens"):
        torch_kit.model(architecture=both)


def test_each_family_that_the_planner_knows_is_run_here_or_refused() -> None:
    """`FAMILIES` have tests of their own; of others, one that runs somewhere is among those of this file."""
    assert {*FAMILIES, *PLANNED_FAMILIES, *UNSUPPORTED} == set(TITLES)
    others = set(TITLES) - set(FAMILIES)
    for name in (*BACKENDS, *ENGINES):
        assert {family for family in others if builds(name, family)} <= set(ARCHITECTURES), name
    assert not any(builds(name, family) for name in (*BACKENDS, *ENGINES) for family in UNSUPPORTED)


GRPO = Path(__file__).parents[2] / "recipes" / "grpo.py"


def unrunnable(model: str, *more: str) -> tuple[str, ...]:
    named = (f"model@models.actor={model}", "models.actor.path=null")
    return compile_recipe(GRPO, [*named, "cluster=h100-8x8", *more]).plan.unrunnable


def test_families_that_run_nowhere_are_refused_by_the_plan() -> None:
    (reason,) = unrunnable("gemma-2-2b")
    assert reason.startswith(
        "models.actor is of family gemma2, which caps scores and logits, so that it can "
    )
    assert unrunnable("gemma-3-1b") == ()
    assert unrunnable("gemma-3-1b", "models.actor.backend=megatron") == ()
    assert unrunnable("gpt-oss-20b", "models.actor.backend=megatron") == ()


def hydra(settings: Mapping[str, Any]) -> str:
    return "{" + ",".join(f"{key}:{value}" for key, value in settings.items()) + "}"


def generating(family: str, *more: str) -> list[str]:
    model = f"models.actor.architecture={hydra(architecture(family))}"
    return ["models.actor.path=null", model, "models.actor.gen.engine=vllm", *more]


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("deepseek_v3", "cluster=cpu-1x2", "kv_lora_rank=512 and qk_rope_head_dim=64 alone, not for 8 and 4"),
        ("deepseek_v3", "models.actor.dtype=fp32", "latent attention on GPUs needs bf16"),
        ("glm4_moe", "models.actor.gen.quantization=fp8", "of family glm4_moe are not quantised"),
        ("glm4_moe", "nodes.actor_gen.routing_replay=true", "mixtral, gpt_oss, not glm4_moe"),
        ("glm4", "models.actor.gen.layout=t2 cluster=h100-1x2", "gate and up of glm4 are one matrix"),
    ],
)
def test_what_vllm_does_not_compute_of_a_family_is_refused_by_the_plan(
    family: str, overrides: str, message: str
) -> None:
    try:
        keys = generating(family, "cluster=h100-1x1", *overrides.split())
        found = " ".join(compile_recipe(GRPO, keys).plan.unrunnable)
    except PlanError as error:
        found = str(error)
    assert message in found


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("gpt_oss", "models.actor.lora.r=8 models.actor.lora.targets=[experts.down_proj]", "experts"),
        ("gpt_oss", "models.actor.kernels=transformer_engine", "but torch computes experts with biases. Set"),
        (
            "deepseek_v3",
            "models.actor.kernels=transformer_engine",
            "but torch computes latent attention. Set",
        ),
        (
            "gemma3_text",
            "models.actor.fp8=blockwise",
            "but torch computes norms behind attention and MLP. Set",
        ),
    ],
)
def test_what_megatron_does_not_compute_of_a_family_is_refused_by_the_plan(
    family: str, overrides: str, message: str
) -> None:
    keys = generating(family, "cluster=h100-1x1", "models.actor.backend=megatron", *overrides.split())
    try:
        found = " ".join(compile_recipe(GRPO, keys).plan.unrunnable)
    except PlanError as error:
        found = str(error)
    assert message in found


def test_adapters_that_vllm_would_not_apply_are_merged() -> None:
    lora = ("models.actor.lora.r=8", "models.actor.lora.alpha=8", "cluster=h100-1x1")
    for family, is_merged in (("mixtral", False), ("deepseek_v3", True), ("glm4", True), ("glm4_moe", True)):
        replicas = compile_recipe(GRPO, generating(family, *lora)).plan.replicas
        (engine,) = (replica for replica in replicas if replica.role == "gen")
        assert engine.merges_adapters == is_merged, family


BALANCE = "models.actor.balance"
DENSE = (f"{BALANCE}.coefficient=0.1",)
MOE = ("model@models.actor=tiny-qwen3-moe", "models.actor.path=null")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (DENSE, r"has no experts \(family qwen2\)"),
        (
            (*MOE, f"{BALANCE}.bias_rate=0.001"),
            "family qwen3_moe have no bias, unlike those of deep",
        ),
        ((*MOE, f"{BALANCE}.over=batch"), "has neither a loss nor a bias"),
        ((*MOE, *DENSE, "models.actor.compile=true"), "compiled layers do not balance experts"),
        (
            (*MOE, "models.actor.balance.bias_rate=1e-3", "models.actor.balance.over=batch"),
            "coefficient is 0",
        ),
    ],
)
def test_a_balance_without_effect_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        compile_recipe(GRPO, overrides)


def test_a_plan_counts_the_pass_that_counts_tokens_and_says_what_balances_the_experts() -> None:
    over_sequences, over_batch = (
        compile_recipe(GRPO, (*MOE, *DENSE, f"{BALANCE}.over={over}")).plan for over in ("sequence", "batch")
    )
    assert over_batch.forecast is not None
    assert over_sequences.forecast is not None
    assert over_batch.forecast.period.seconds > 1.05 * over_sequences.forecast.period.seconds
    assert experts_line(over_batch).endswith("balanced by a loss over each batch with coefficient 0.1")
