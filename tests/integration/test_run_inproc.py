"""`hflow run` for real, in one process: what it leaves, and what its results may depend on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import ROOT, largest_difference, run, steps_of, weights_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hflow import launch
from hflow.errors import PlanError
from hflow.report.summary import RunSummary

ROWS = "data.train.limit=64"
"""So few that a model is soon right about them now and then."""
INPROC = ["workers=inproc", "cluster=cpu-1x1", "nodes.eval_gen.after=1000", "data.heldout.limit=20", ROWS]


TRAINS = {"grpo": "actor_train", "sft": "sft_train"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model after some supervised steps on the rows of these tests: now and then it is right."""
    out = tmp_path_factory.mktemp("sft")
    quick = ["steps=30", "batch=64", "models.actor.optim.lr=3e-3", "models.actor.optim.warmup_steps=5"]
    summary = run("recipes/sft.py", out, *INPROC, *quick)
    return (summary.directory / "checkpoints" / "latest" / "actor").resolve()


def test_a_run_writes_all_documented_files(checkpoint: Path, tmp_path: Path) -> None:
    summary = run(
        "recipes/grpo.py",
        tmp_path,
        "workers=inproc",
        "cluster=cpu-1x1",
        "steps=2",
        "batch=4",
        "data.heldout.limit=20",
        ROWS,
        f"models.actor.path={checkpoint}",
    )
    directory = summary.directory
    assert (summary.reason, summary.steps) == ("done", 2)
    assert json.loads((directory / "plan.json").read_text())["plan"]["digest"] == summary.plan_digest
    assert "steps: 2" in (directory / "config.yaml").read_text()
    assert json.loads((directory / "summary.json").read_text())["steps"] == 2
    assert list((directory / "tensorboard").iterdir())
    rows = steps_of(summary)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["batch/samples"] == 32
    assert 0 <= rows[0]["actor_gen/reward"] <= 1
    for row in rows:
        assert 0 < row["actor_train/engine_gap"] <= row["actor_train/engine_gap.max"] < 1e-3
        assert 0 <= row["actor_train/engine_kl"] < 1e-8
        assert 0 < row["actor_train/engine_tokens"] < row["actor_train/num_tokens"]
    names = {event["name"] for event in json.loads((directory / "trace.json").read_text())["traceEvents"]}
    assert {"actor_train", "group_advantage", "score", "accuracy"} <= names
    evaluated = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evaluated if "eval_gen/accuracy" in row] == [0, 2]
    assert (tmp_path / "grpo" / "latest").resolve() == directory.resolve()


def test_a_run_is_repeated_from_its_plan(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [*INPROC, "steps=2", "batch=4", f"models.actor.path={checkpoint}"]
    first = run("recipes/grpo.py", tmp_path / "first", *common)
    monkeypatch.chdir(ROOT)
    again = launch.run_plan(first.directory, None, [f"out={tmp_path / 'again'}"], live=False)
    assert (again.plan_digest, again.steps) == (first.plan_digest, 2)
    assert again.directory.is_relative_to(tmp_path / "again")
    assert largest_difference(weights_of(first), weights_of(again)) == 0
    with pytest.raises(PlanError, match="is out of date: schedule num_steps: 2 -> 3"):
        launch.run_plan(first.directory, None, ["steps=3"], live=False)


def test_checkpoints_load_with_transformers(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = torch.tensor([tokenizer("17+25=")["input_ids"]])  # it adds <bos>
    with torch.no_grad():
        assert model(ids).logits.shape == (1, 7, 32)


def test_a_model_whose_train_node_never_fires_can_run(tmp_path: Path) -> None:
    short = ["steps=2", "batch=4", "models.actor.path=null"]
    summary = run("recipes/ppo.py", tmp_path, *INPROC, *short)
    assert summary.steps == 2
    assert any(warning.startswith("actor_train never fires") for warning in summary.warnings)
    assert not any("actor_train/loss" in row for row in steps_of(summary))


@pytest.fixture(scope="module", params=["grpo", "sft"])
def whole(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[str], RunSummary]:
    """Recipe, overrides, and a run of both that nothing cuts."""
    recipe = request.param
    common = [*INPROC, "steps=3", "batch=8", f"models.actor.path={checkpoint}"]
    common += ["models.actor.optim.warmup_steps=0", "models.actor.optim.lr=1e-4"]
    common += [f"nodes.{TRAINS[recipe]}.epochs=2", f"nodes.{TRAINS[recipe]}.minibatches=3"]
    return recipe, common, run(f"recipes/{recipe}.py", tmp_path_factory.mktemp("whole"), *common)


@pytest.mark.parametrize(
    "change",
    [
        ["cluster=cpu-1x2"],
        ["models.actor.tokens_per_microbatch=40"],
        ["models.actor.gen.max_running=3"],
        ["schedule.max_concurrent=16"],
    ],
    ids=["two dp shards", "tiny micro-batches", "small engine", "few in flight"],
)
def test_results_do_not_depend_on_how_a_run_is_cut(
    whole: tuple[str, list[str], RunSummary], checkpoint: Path, tmp_path: Path, change: list[str]
) -> None:
    recipe, common, reference = whole
    cut = run(f"recipes/{recipe}.py", tmp_path, *common, *change)
    for ours, theirs in zip(steps_of(reference), steps_of(cut), strict=True):
        assert ours.get("actor_gen/reward") == theirs.get("actor_gen/reward")
        loss = f"{TRAINS[recipe]}/loss"
        assert ours[loss] == pytest.approx(theirs[loss], abs=1e-5)
    if recipe == "grpo":
        assert any(0 < row["actor_gen/reward"] < 1 for row in steps_of(reference))
    assert largest_difference(weights_of(reference), weights_of(cut)) < 1e-5
    assert largest_difference(weights_of(reference), load_file(checkpoint / "model.safetensors")) > 1e-4


@pytest.mark.parametrize(
    ("engine", "backend"),
    [
        ("embedded", "torch"),
        ("vllm", "torch"),
        pytest.param("vllm", "megatron", marks=pytest.mark.long),
    ],
)
def test_a_run_replays_the_experts_of_its_engine(tmp_path: Path, engine: str, backend: str) -> None:
    mixed = ["model@models.actor=tiny-qwen3-moe", "models.actor.path=null", "models.actor.dtype=bf16"]
    # Of many experts some are nearly equal, so that rounding decides.
    sizes = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 16}
    mixed += [f"models.actor.architecture.{name}={size}" for name, size in sizes.items()]
    mixed += [f"models.actor.gen.engine={engine}", f"models.actor.backend={backend}"]
    short = ["steps=2", "batch=4", "nodes.actor_gen.routing_replay=true"]
    rows = steps_of(run("recipes/grpo.py", tmp_path, *INPROC, *mixed, *short))
    assert all(0 < row["actor_train/rerouted"] < 0.2 for row in rows)
