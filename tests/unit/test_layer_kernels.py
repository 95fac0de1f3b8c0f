"""The kernels of layers: which ones a plan chooses, how it says so, and what is refused."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from plan_graphs import grpo, request
from rich.console import Console

from hflow import doctor
from hflow.base.errors import BackendError, PlanError
from hflow.config.schema import ModelConfig
from hflow.launch.planning.compile import Compiled, compile_recipe
from hflow.launch.planning.request import known_devices
from hflow.launch.running.preflight import refuse_unrunnable
from hflow.launch.running.worker_setup import model_settings
from hflow.planner.compile import compile_plan
from hflow.report.content import layers_line
from hflow.report.text.plan.header import header
from hflow.types import kernels
from hflow.types.kernels import FP8_NEEDS, LayerKernels, TransformerEngine, choose_kernels

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.py"
MEGATRON = "models.actor.backend=megatron"
EMBEDDED = "models.actor.gen.engine=embedded"
INSTALLED = TransformerEngine("2.10.0", "")
OTHER = TransformerEngine("2.20.2", "megatron-core 0.16.1 is made for transformer-engine <2.12")
TORCH, TE = LayerKernels


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "kernels", "why"),
    [
        ("cuda", "bf16", INSTALLED, TE, "installed, bf16"),
        ("cuda", "bf16", None, TORCH, "transformer-engine is not installed"),
        ("cuda", "bf16", OTHER, TORCH, OTHER.mismatch),
        ("cuda", "fp32", INSTALLED, TORCH, "transformer-engine multiplies fp32 in TF32"),
        ("cpu", "fp32", INSTALLED, TORCH, "the cluster is cpu"),
    ],
)
def test_the_default_is_what_is_installed_and_exact(device, dtype, installed, kernels, why):
    assert choose_kernels("auto", device, dtype, installed) == (kernels, why)
    assert choose_kernels("torch", device, dtype, installed) == (TORCH, "as set")


def compiled(monkeypatch: pytest.MonkeyPatch, installed: TransformerEngine | None, *keys: str) -> Compiled:
    for module in ("planning.request", "running.preflight"):
        monkeypatch.setattr(f"hflow.launch.{module}.installed_transformer_engine", lambda: installed)
    return compile_recipe(RECIPE, [MEGATRON, *keys])


@pytest.mark.parametrize(
    ("installed", "cluster", "line"),
    [
        (INSTALLED, "h100-1x2", "transformer_engine 2.10.0: installed, bf16"),
        (None, "h100-1x2", "torch: transformer-engine is not installed"),
        (INSTALLED, "cpu-1x2", "torch: the cluster is cpu"),
    ],
)
def test_the_plan_states_the_kernels_and_workers_use_them(monkeypatch, installed, cluster, line):
    made = compiled(monkeypatch, installed, f"cluster={cluster}")
    assert layers_line(made.plan) == line
    console = Console(width=120)
    with console.capture() as capture:
        console.print(header(made.plan))
    assert line in capture.get()
    assert model_settings(made)["actor"].kernels == line.partition(" ")[0].rstrip(":")


def test_the_kernels_do_not_change_the_digest_and_other_backends_have_none(monkeypatch):
    with_it, without = (compiled(monkeypatch, x, "cluster=h100-1x2").plan for x in (INSTALLED, None))
    assert with_it.layers != without.layers
    assert with_it.digest == without.digest
    assert compile_recipe(RECIPE, []).plan.layers == ()


def test_kernels_of_a_backend_that_has_no_others_are_refused():
    message = "models.actor.kernels is torch, but the torch backend computes with the modules of transformers"
    with pytest.raises(PlanError, match=message):
        compile_plan(grpo(), request(models={"actor": ModelConfig(kernels="torch")}))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["cluster=cpu-1x1"], "the cluster is cpu"),
        (["cluster=h100-1x1", "models.actor.dtype=fp32"], "transformer-engine multiplies fp32 in TF32"),
    ],
)
def test_a_model_that_transformer_engine_does_not_compute_cannot_run(monkeypatch, keys, reason):
    plan = compiled(monkeypatch, INSTALLED, "models.actor.kernels=transformer_engine", *keys).plan
    line = f"models.actor.kernels is transformer_engine, but {reason}. Set models.actor.kernels=torch."
    assert line in plan.unrunnable


@pytest.mark.parametrize(
    ("installed", "reason"), [(None, "transformer-engine is not installed"), (OTHER, OTHER.mismatch)]
)
def test_a_transformer_engine_that_is_missing_is_refused_before_anything_starts(
    monkeypatch, installed, reason
):
    keys = ["models.actor.kernels=transformer_engine", EMBEDDED]
    made = compiled(monkeypatch, installed, "cluster=h100-1x1", "workers=inproc", *keys)
    assert made.plan.unrunnable == ()
    with pytest.raises(BackendError) as error:
        refuse_unrunnable(made)
    assert str(error.value) == (
        f"models.actor.kernels is transformer_engine, but {reason}. Run pip install --no-build-isolation "
        "'hflow-rl[transformer-engine]', or set models.actor.kernels=torch"
    )


FP8 = "models.actor.fp8=tensorwise"
H100 = "cluster=h100-1x2"


def test_products_in_fp8_need_transformer_engine_and_change_the_digest(monkeypatch):
    plain, made = (compiled(monkeypatch, INSTALLED, H100, *keys).plan for keys in ([], [FP8]))
    assert layers_line(made) == "transformer_engine 2.10.0: products in FP8, tensorwise"
    assert made.unrunnable == ()
    assert made.digest != plain.digest
    assert model_settings(compiled(monkeypatch, None, H100, FP8))["actor"].kernels == TE
    with pytest.raises(BackendError) as error:
        refuse_unrunnable(compiled(monkeypatch, None, "cluster=h100-1x1", "workers=inproc", EMBEDDED, FP8))
    assert str(error.value) == (
        "models.actor.fp8 is tensorwise, but transformer-engine is not installed. Run pip install "
        "--no-build-isolation 'hflow-rl[transformer-engine]', or set models.actor.fp8=null"
    )


def test_backends_and_kernels_without_fp8_are_refused():
    config = ModelConfig(fp8="mxfp8")
    with pytest.raises(PlanError, match=r"the torch backend does not .* set models.actor.backend=megatron"):
        compile_plan(grpo(), request(models={"actor": config}))
    config = ModelConfig(backend="megatron", kernels="torch", fp8="mxfp8")
    with pytest.raises(PlanError, match=r"fp8 is mxfp8, but models.actor.kernels is torch"):
        compile_plan(grpo(), request(models={"actor": config}))


SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def sized(**changes: int) -> list[str]:
    return [f"models.actor.architecture.{name}={size}" for name, size in (SIZES | changes).items()]


@pytest.mark.parametrize(
    ("fp8", "keys", "reason"),
    [
        ("tensorwise", ["cluster=cpu-1x2"], "the cluster is cpu"),
        ("tensorwise", [H100, "models.actor.dtype=fp32"], "transformer-engine multiplies fp32 in TF32"),
        (
            "tensorwise",
            ["cluster=a100-80g-1x2"],
            "a100-80g has compute capability 8.0, which computes no recipe",
        ),
        (
            "mxfp8",
            [H100],
            "h100 has compute capability 9.0, which computes tensorwise and blockwise",
        ),
        (
            "mxfp8",
            ["cluster=rtx-5090-1x2"],
            "rtx-5090 has compute capability 12.0, which computes tensorwise and blockwise",
        ),
        ("blockwise", [H100, *sized(hidden_size=192)], "the hidden size, 192, is not a multiple of 128"),
        (
            "tensorwise",
            [H100, "models.actor.layout=d1t2", *sized(intermediate_size=240)],
            "the intermediate size of a rank of d1t2p1, 120, is not a multiple of 16",
        ),
        (
            "mxfp8",
            ["cluster=b200-1x2", *sized(hidden_size=96, num_attention_heads=12, num_key_value_heads=3)],
            "the size of its queries, keys and values, 144, is not a multiple of 32",
        ),
        (
            "tensorwise",
            ["cluster=h100-1x4", "models.actor.layout=d1t4", *sized()],
            "d1t4p1 has more tensor ranks than actor key-value heads (2), whose copies are projected in bf16",
        ),
    ],
)
def test_a_model_that_is_not_multiplied_in_fp8_cannot_run(monkeypatch, fp8, keys, reason):
    made = compiled(monkeypatch, INSTALLED, f"models.actor.fp8={fp8}", *keys)
    line = f"models.actor.fp8 is {fp8}, but {reason}. Set models.actor.fp8=null."
    assert line in made.plan.unrunnable


def test_devices_with_an_fp8_rate_compute_a_recipe():
    for name, device in known_devices(RECIPE).items():
        if device.capability is not None:
            computes = any(needs.fits(device.capability) for needs in FP8_NEEDS.values())
            assert computes == ("fp8" in device.tflops), name


def test_a_reference_or_an_engine_with_other_products_is_warned_of(monkeypatch):
    ppo = RECIPE.with_name("ppo.py")
    keys = [H100, MEGATRON, "models.ref.backend=megatron"]
    found = compile_recipe(ppo, [*keys, FP8]).plan.warnings
    (line,) = [one for one in found if "models.ref" in one]
    assert line.startswith("models.ref.fp8 is null, but models.actor.fp8 is tensorwise: ")
    assert "Set models.ref.fp8=tensorwise" in line
    found = compile_recipe(ppo, [*keys, FP8, "models.ref.fp8=tensorwise"]).plan.warnings
    assert not any("models.ref" in one for one in found)
    line = "models.actor.fp8=tensorwise makes the engine draw from another policy than the trainer's"
    asked = [H100, MEGATRON, FP8]
    assert any(line in one for one in compile_recipe(RECIPE, asked).plan.warnings)
    asked.append("nodes.actor_train.prox=recompute")
    assert not any(line in one for one in compile_recipe(RECIPE, asked).plan.warnings)


@pytest.mark.parametrize(("version", "fits"), [("2.10.0", True), ("2.20.2", False), ("1.13", False)])
def test_megatron_says_which_versions_it_is_made_for(monkeypatch, version, fits):
    """From the metadata of the installed megatron-core."""
    pytest.importorskip("megatron")
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: version if name == "transformer-engine" else real(name)
    )
    kernels.installed_transformer_engine.cache_clear()
    found = kernels.installed_transformer_engine()
    kernels.installed_transformer_engine.cache_clear()
    assert found is not None
    assert found.version == version
    assert (found.mismatch == "") is fits
    if not fits:
        assert (
            f"is made for transformer-engine <2.12.0,>=2.9.0a0, but {version} is installed" in found.mismatch
        )


def test_two_cores_of_transformer_engine_are_refused(monkeypatch):
    """It loads the library for CUDA 12 first, whatever torch was built for."""
    installed = {"transformer-engine", *kernels.TE_CORES}
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2.10.0" if name in installed else real(name))
    kernels.installed_transformer_engine.cache_clear()
    found = kernels.installed_transformer_engine()
    kernels.installed_transformer_engine.cache_clear()
    assert "transformer-engine-cu12 and transformer-engine-cu13 are both installed" in found.mismatch


def test_doctor_names_a_version_that_does_not_fit(monkeypatch):
    part = doctor.OptionalPart("transformer-engine", "layers", ("typer",), lambda: OTHER.mismatch)
    finding = doctor._check_optional(part)
    assert (finding.ok, finding.required) == (False, False)
    assert finding.detail == f"layers: {OTHER.mismatch}"
    assert finding.fix == "pip install 'hflow-rl[transformer-engine]'"
