"""Runs that train adapters: the reference is the base model, and a resume restores adapters and optimizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import ROOT, largest_difference, run, steps_of
from safetensors.torch import load_file, save_file

from hflow.base.errors import BackendError, ConfigError
from hflow.launch.checkpoints.export import export
from hflow.launch.checkpoints.merged import merge_adapter, model_directory
from hflow.launch.checkpoints.served import find_checkpoint
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running import run_recipe
from hflow.launch.running.worker_setup import make_setup
from hflow.models.settings import ModelSettings, RankPosition
from hflow.runtime.records.run_summary import RunSummary
from hflow.training.fsdp.backend import TorchModel
from hflow.training.interface import ENGINE_GAP_MAX
from hflow.workers.worker import build_backends, hosted_replicas

RECIPE = "recipes/reinforce_pp.py"
COMMON = ["workers=inproc", "cluster=cpu-1x1", "batch=8", "data.train.limit=32", "nodes.eval_gen.after=99"]
COMMON += ["models.actor.lora={r: 4, alpha: 8}", "models.actor.optim.lr=1e-2"]
COMMON += ["models.actor.optim.warmup_steps=0"]
MEGATRON = [f"models.{name}.backend=megatron" for name in ("actor", "ref")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a checkpoint of the recipe's tiny model."""
    return saved_base(tmp_path_factory.mktemp("base"))


def saved_base(path: Path, *overrides: str) -> str:
    """Save a model with random weights, and return the override that begins from it."""
    compiled = compile_recipe(ROOT / RECIPE, [*overrides, "models.actor.path=null"])
    architecture = compiled.config.models["actor"].architecture
    TorchModel(ModelSettings(name="actor", architecture=architecture), RankPosition()).save(str(path))()
    return f"models.actor.path={path}"


@pytest.fixture(scope="module")
def summary(base: str, tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    saved = ["save_every=1", "keep_checkpoints=null", "steps=3"]
    return run(RECIPE, tmp_path_factory.mktemp("run"), *COMMON, *saved, base)


def adapter(summary: RunSummary, step: str = "latest") -> dict[str, torch.Tensor]:
    return load_file(summary.directory / "checkpoints" / step / "actor" / "adapter_model.safetensors")


def test_the_engine_draws_from_the_adapted_model(summary: RunSummary) -> None:
    """It shares the trainer's weights; its log-probs are the trainer's while the adapters change."""
    rows = steps_of(summary)
    assert max(row[f"actor_train/{ENGINE_GAP_MAX.suffix}"] for row in rows) < 1e-5
    assert largest_difference(adapter(summary, "step-1"), adapter(summary, "step-2")) > 1e-3
    files = {path.name for path in (summary.directory / "checkpoints/latest/actor").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "shards"} <= files
    assert "model.safetensors" not in files


@pytest.mark.parametrize("options", ["dora: true", "dora: true, base: nf4"])
def test_magnitudes_and_weights_in_4_bits(base: str, tmp_path: Path, options: str) -> None:
    """The engine and the reference are the trainer's. An export has the weights that adapters were beside."""
    if "nf4" in options:
        pytest.importorskip("bitsandbytes")
    lora = f"models.actor.lora={{r: 4, alpha: 8, save_merged: true, {options}}}"
    summary = run(RECIPE, tmp_path / "run", *COMMON, lora, "steps=2", base)
    rows = steps_of(summary)
    assert max(row[f"actor_train/{ENGINE_GAP_MAX.suffix}"] for row in rows) < 1e-5
    saved = summary.directory / "checkpoints" / "latest" / "actor"
    assert any(name.endswith("lora_magnitude_vector") for name in adapter(summary))
    merged, trained = tmp_path / "merged", load_file(saved / "merged" / "model.safetensors")
    merge_adapter(saved, merged)
    for name, tensor in load_file(merged / "model.safetensors").items():
        torch.testing.assert_close(tensor, trained[name], atol=1e-6, rtol=0)


def test_adapters_of_experts(tmp_path: Path) -> None:
    """The engine and the reference are the trainer's, also after a resume, and the export has them.

    With megatron the engine has adapters of its own, and the next steps are torch's.
    """
    mixed, targets = (
        "model@models.actor=tiny-qwen3-moe",
        "[all-linear,experts.gate_up_proj,experts.down_proj]",
    )
    lora = f"models.actor.lora={{r: 4, alpha: 8, save_merged: true, targets: {targets}}}"
    base = saved_base(tmp_path / "base", mixed)
    saving = ["save_every=1", "keep_checkpoints=null", "steps=3"]
    summary = run(RECIPE, tmp_path / "run", mixed, *COMMON, lora, base, *saving)
    assert max(row[f"actor_train/{ENGINE_GAP_MAX.suffix}"] for row in steps_of(summary)) < 1e-5
    assert {"experts.base_layer.lora_A.weight", "experts.lora_B.weight"} <= {
        name.rpartition("mlp.")[2] for name in adapter(summary)
    }
    assert largest_difference(adapter(summary, "step-1"), adapter(summary, "step-2")) > 1e-3
    saved = summary.directory / "checkpoints" / "latest" / "actor"
    merged, trained = tmp_path / "merged", load_file(saved / "merged" / "model.safetensors")
    merge_adapter(saved, merged)
    for name, tensor in load_file(merged / "model.safetensors").items():
        torch.testing.assert_close(tensor, trained[name], atol=1e-6, rtol=0)
    for name, changes, difference in (("torch", [], 0), ("megatron", MEGATRON, 1e-4)):
        copy = tmp_path / name
        shutil.copytree(summary.directory, copy, symlinks=True)
        for step in (2, 3):
            shutil.rmtree(copy / "checkpoints" / f"step-{step}")
        resumed = run_recipe.resume(str(copy), changes, live=False)
        assert max(row[f"actor_train/{ENGINE_GAP_MAX.suffix}"] for row in steps_of(resumed)) < 1e-5
        assert largest_difference(adapter(resumed), adapter(summary)) <= difference


def test_a_reference_model_is_the_trainer_without_adapters(base: str) -> None:
    compiled = compile_recipe(ROOT / RECIPE, [*COMMON, base])
    assert {r.name: r.base_of for r in compiled.plan.replicas}["ref@infer"] == "actor@train"
    setup = make_setup(compiled)
    backends = build_backends(setup, hosted_replicas(setup, [0]), None)
    actor, ref = backends["actor@train"], backends["ref@infer"]
    assert isinstance(actor, TorchModel)
    assert isinstance(ref, TorchModel)
    assert ref._model is actor._model


def test_a_resumed_run_restores_adapters_and_optimizer(summary: RunSummary, tmp_path: Path) -> None:
    copy = tmp_path / "interrupted"
    shutil.copytree(summary.directory, copy, symlinks=True)
    for step in (2, 3):
        shutil.rmtree(copy / "checkpoints" / f"step-{step}")
    resumed = run_recipe.resume(str(copy), live=False)
    assert resumed.steps == 3
    assert largest_difference(adapter(resumed), adapter(summary)) == 0
    before, after = (
        [json.loads(line) for line in (s.directory / "metrics.jsonl").read_text().splitlines()]
        for s in (summary, resumed)
    )
    losses = [
        {row["step"]: row["actor_train/loss"] for row in rows if "actor_train/loss" in row}
        for rows in (before, after)
    ]
    assert losses[0] == losses[1]


def test_megatron_continues_what_torch_has_saved(summary: RunSummary, base: str, tmp_path: Path) -> None:
    """With the reference on the base, and an engine that gets the adapters. The next step is torch's."""
    copy = tmp_path / "interrupted"
    shutil.copytree(summary.directory, copy, symlinks=True)
    for step in (2, 3):
        shutil.rmtree(copy / "checkpoints" / f"step-{step}")
    compiled = compile_recipe(ROOT / RECIPE, [*COMMON, base, *MEGATRON])
    assert {r.name: r.base_of for r in compiled.plan.replicas}["ref@infer"] == "actor@train"
    resumed = run_recipe.resume(str(copy), MEGATRON, live=False)
    assert resumed.steps == 3
    rows, wanted = ({row["step"]: row for row in steps_of(s)} for s in (resumed, summary))
    for name in ("actor_train/loss", "actor_train/grad_norm"):
        assert rows[2][name] == pytest.approx(wanted[2][name], rel=1e-4, abs=1e-6)
    assert rows[3][f"actor_train/{ENGINE_GAP_MAX.suffix}"] < 1e-5
    assert adapter(resumed).keys() == adapter(summary).keys()


def test_a_checkpoint_of_an_adapter_is_served_merged(summary: RunSummary, base: str, tmp_path: Path) -> None:
    """The merged model has the base's tensors."""
    served = find_checkpoint(str(summary.directory), [], None)
    assert (served.name, served.dtype) == ("actor", "fp32")
    assert served.tokenizer.path == str(served.directory)
    merged, before = (
        load_file(path / "model.safetensors") for path in (served.directory, Path(base.partition("=")[2]))
    )
    assert merged.keys() == before.keys()
    exported = export(str(summary.directory), tmp_path / "exported")
    assert exported.directory.stat().st_mode == summary.directory.stat().st_mode  # others can read it
    again = load_file(exported.directory / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in merged.items())
    moved = {name for name in merged if not torch.equal(merged[name], before[name])}
    assert moved == {name for name in merged if "_proj.weight" in name}
    saved = summary.directory / "checkpoints/latest/actor"
    other = tmp_path / "other"
    shutil.copytree(base.partition("=")[2], other)
    save_file({name: 2 * tensor for name, tensor in before.items()}, other / "model.safetensors")
    moved_base = tmp_path / "run/checkpoints/step-3/actor"
    shutil.copytree(saved, moved_base, symlinks=True)
    shutil.copy(summary.directory / "inputs.json", tmp_path / "run")
    config = json.loads((moved_base / "adapter_config.json").read_text())
    (moved_base / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(other)})
    )
    with pytest.raises(ConfigError, match=r"adapter of other weights .*/other/model\.safetensors has other"):
        model_directory(moved_base)
    with pytest.raises(ConfigError, match=r"adapter of other weights .*/other/model\.safetensors has other"):
        run(RECIPE, tmp_path / "refused", *COMMON, base, f"models.ref.path={moved_base}")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "gone"}')
    with pytest.raises(ConfigError, match="an adapter of the model in gone, which has no checkpoint"):
        find_checkpoint(str(tmp_path), [], None)


def test_the_path_of_a_model_may_be_an_adapter(
    summary: RunSummary, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference that was trained before is the exported one, and new adapters are trained beside that."""
    monkeypatch.setenv("HFLOW_CACHE", str(tmp_path / "cache"))
    saved = summary.directory / "checkpoints/latest/actor"
    exported = export(str(summary.directory), tmp_path / "exported").directory
    rows = []
    for number, path in enumerate((saved, exported, saved)):
        reference = [base, f"models.ref.path={path}", "nodes.kl_reward.beta=0.5", "steps=2"]
        done = run(RECIPE, tmp_path / str(number), *COMMON, *reference)
        rows.append([row["actor_train/loss"] for row in steps_of(done)])
    assert rows[0] == rows[1] == rows[2]
    assert len(list((tmp_path / "cache").glob("merged-actor-*/model.safetensors"))) == 1
    resumed = run_recipe.resume(str(done.directory), ["steps=3"], live=False)
    assert resumed.steps == 3
    plans = [
        compile_recipe(ROOT / RECIPE, [*COMMON, f"models.actor.path={p}"]).plan for p in (saved, exported)
    ]
    assert plans[0].shapes == plans[1].shapes
    again, wanted = (
        run(RECIPE, tmp_path / name, *COMMON, f"models.actor.path={path}", "steps=2")
        for name, path in (("again", saved), ("wanted", exported))
    )
    assert largest_difference(adapter(again), adapter(wanted)) == 0
    config = json.loads((again.directory / "checkpoints/latest/actor/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(saved.resolve())
    merged = [
        load_file(find_checkpoint(str(x.directory), [], None).directory / "model.safetensors")
        for x in (again, wanted)
    ]
    assert all(torch.equal(x, merged[1][name]) for name, x in merged[0].items())
    with pytest.raises(ConfigError, match=r"has the optimizer state of an adapter alone; set"):
        run(
            RECIPE,
            tmp_path / "refused",
            *COMMON[:-3],
            f"models.actor.path={saved}",
            "models.actor.resume=true",
        )


def test_random_weights_and_a_missing_package_are_refused(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"starts from random ones; set models\.actor\.path"):
        run(RECIPE, tmp_path, *COMMON, "models.actor.path=null")
    monkeypatch.setattr("hflow.models.adapter.find_spec", lambda name: name == "peft" or None)
    with pytest.raises(
        BackendError, match=r"base=nf4 needs the package bitsandbytes, .* 'hflow-rl\[qlora\]'"
    ):
        run(RECIPE, tmp_path, *COMMON, "models.actor.lora={r: 4, base: nf4}", base)
    monkeypatch.setattr("hflow.models.adapter.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"needs the package peft, .* pip install 'hflow-rl\[lora\]'"):
        run(RECIPE, tmp_path, *COMMON, base)
    assert not list(tmp_path.iterdir())
