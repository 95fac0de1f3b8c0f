"""The training backend of models that leave it open: chosen by predicted seconds, with the reason."""

from __future__ import annotations

import pytest
from search_kit import LENGTHS, RECIPES

from hflow.launch.planning.compile import Compiled, compile_recipe
from hflow.types.kernels import TransformerEngine

PPO = (
    "cluster=h100-1x8",
    "batch=64",
    "model@models.actor=qwen2.5-3b",
    "models.actor.path=null",
    "models.actor.gen.engine=vllm",
    *LENGTHS,
)
KEYS = tuple(f"models.{name}.backend" for name in ("actor", "critic", "ref"))


@pytest.fixture
def with_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has megatron and the kernels with which its seconds were measured."""
    request = "hflow.launch.planning.request"
    monkeypatch.setattr(f"{request}.backend_problems", lambda device: {})
    monkeypatch.setattr(f"{request}.installed_transformer_engine", lambda: TransformerEngine("2.9", ""))


def planned(*overrides: str, recipe: str = "ppo") -> Compiled:
    return compile_recipe(RECIPES / f"{recipe}.py", (*PPO, *overrides))


def backends(compiled: Compiled) -> set[str]:
    return {replica.backend for replica in compiled.plan.replicas if replica.role != "gen"}


@pytest.mark.usefixtures("with_megatron")
def test_the_backend_that_makes_a_step_clearly_shorter_is_chosen_for_all_models_that_leave_it_open() -> None:
    keys = ("batch=512", "cluster=h100-1x8", "schedule.max_concurrent=512")
    free = planned(*keys)
    set_to = {name: planned(*keys, *(f"+{key}={name}" for key in KEYS)) for name in ("torch", "megatron")}
    torch, megatron = (set_to[name].plan.forecast.candidates[0].seconds for name in ("torch", "megatron"))
    assert megatron < 0.95 * torch
    assert backends(free) == {"megatron"}
    assert free.plan.forecast.candidates[0].seconds == pytest.approx(megatron, rel=1e-3)
    gain = f"{1 - megatron / torch:.0%}".replace("%", " %")
    assert free.plan.forecast.backend == f"megatron: a step takes {gain} less than with torch"
    assert {free.config.models[key.split(".")[1]].backend for key in KEYS} == {"megatron"}
    assert any("with torch: +" in row.why for row in free.plan.forecast.candidates)
    assert {set_to[name].plan.forecast.backend for name in set_to} == {""}


@pytest.mark.usefixtures("with_megatron")
def test_a_backend_that_is_little_faster_is_not_chosen() -> None:
    free = planned()
    megatron = planned(*(f"+{key}=megatron" for key in KEYS))
    torch, other = (compiled.plan.forecast.candidates[0].seconds for compiled in (free, megatron))
    assert 0.95 * torch < other < torch
    assert backends(free) == {"torch"}
    assert free.plan.forecast.backend == "torch: with megatron a step is not 5 % shorter"


def test_a_backend_that_is_not_installed_is_not_chosen_and_named() -> None:
    plan = planned().plan
    assert plan.forecast.backend == "torch: megatron is not installed; pip install megatron-core"
    assert {replica.backend for replica in plan.replicas if replica.role != "gen"} == {"torch"}


def test_a_backend_whose_kernels_are_missing_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hflow.launch.planning.request.backend_problems", lambda device: {})
    monkeypatch.setattr("hflow.launch.planning.request.installed_transformer_engine", lambda: None)
    assert "Transformer Engine alone" in planned().plan.forecast.backend


@pytest.mark.usefixtures("with_megatron")
@pytest.mark.parametrize(
    "setting",
    [
        "models.actor.backend=torch",
        "models.actor.zero_stage=2",
        "models.actor.compile=true",
        "+models.actor.lora={dora: true}",
    ],
)
def test_settings_of_a_backend_keep_it(setting: str) -> None:
    replica = planned(setting).plan.replica("actor@train")
    assert replica.backend == "torch"


@pytest.mark.usefixtures("with_megatron")
def test_what_fits_with_another_backend_only_is_planned_with_it() -> None:
    """A sequence so long that ranks have to divide it, which FSDP does not."""
    long = ("nodes.actor_gen.max_tokens=700000", "models.actor.gen.max_model_len=701000")
    free = planned(*long, "batch=8", "workload.response_mean=20000", recipe="grpo")
    assert free.plan.replica("actor@train").layout.context > 1
    assert free.plan.forecast.backend == "megatron: with torch no plan fits"


@pytest.mark.usefixtures("with_megatron")
def test_what_changes_results_is_named_and_not_chosen() -> None:
    """Long responses of a few sequences, whose decoding waits for the weights to be read."""
    keys = (
        "batch=2",
        "cluster=h100-1x1",
        "workload.response_mean=900",
        *(f"+{key}=megatron" for key in KEYS[:1]),
    )
    arguments = (*PPO, *keys)
    compiled = compile_recipe(RECIPES / "grpo.py", arguments, with_limits=True)
    named = {
        key: (value, remedy.gain)
        for limit in compiled.plan.forecast.limits
        for remedy in limit.remedies
        for key, value in remedy.settings
        if "FP8" in limit.cause
    }
    value, gain = named["models.actor.gen.quantization"]
    assert compiled.config.models["actor"].gen.quantization is None
    followed = compile_recipe(RECIPES / "grpo.py", (*arguments, f"models.actor.gen.quantization={value}"))
    before, after = (c.plan.forecast.period.seconds for c in (compiled, followed))
    assert 1 - after / before == pytest.approx(gain, abs=0.01)


@pytest.mark.usefixtures("with_megatron")
def test_samples_in_flight_are_what_engines_hold() -> None:
    many = ("batch=4096", "schedule.max_concurrent=null", "models.actor.gen.max_running=64")
    plan = planned(*many, recipe="grpo").plan
    engine = plan.replica("actor@gen")
    (choice,) = plan.engines
    held = min(64, choice.largest_batch) + 8
    assert plan.schedule.settings.max_concurrent == held * engine.layout.data < 8 * 4096
    few = planned("schedule.max_concurrent=null", recipe="grpo").plan
    assert few.schedule.settings.max_concurrent == 8 * 64, "all that staleness allows"


@pytest.mark.usefixtures("with_megatron")
def test_cpus_keep_the_default_backend() -> None:
    """Results of shipped recipes on CPUs are compared with stored ones."""
    compiled = compile_recipe(RECIPES / "ppo.py", ("cluster=cpu-1x2", "placement=auto"))
    assert backends(compiled) == {"torch"}
    assert compiled.plan.forecast.backend == ""
