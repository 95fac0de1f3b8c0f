"""`hflow run` for real, in one process: what it leaves, and what its results may depend on."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import ROOT, largest_difference, run, steps_of, weights_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hflow import launch
from hflow.base.errors import ConfigError, PlanError
from hflow.launch.checkpoints.export import export
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.results.runs import read_report
from hflow.launch.running.run_recipe import resume
from hflow.report.html.run import render_run_page
from hflow.report.text.results import render_run_report
from hflow.runtime.execution.batch_runner import BatchRunner
from hflow.runtime.execution.node_execution import StepBatch
from hflow.runtime.records.run_summary import RunSummary

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


def test_rows_of_metrics_are_in_order_when_an_early_step_is_summarized_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples of the first step are summarized when the second step is closed."""
    second_closes = asyncio.Event()
    summarize, close_step = BatchRunner.summarize, BatchRunner.close_step

    async def summarize_late(self: BatchRunner, batch: StepBatch, is_evaluation: bool) -> None:
        if batch.step == 0 and not is_evaluation:
            await second_closes.wait()
            await asyncio.sleep(0.1)
        await summarize(self, batch, is_evaluation)

    async def close_and_tell(self: BatchRunner, step: int) -> None:
        await close_step(self, step)
        if step == 1:
            second_closes.set()

    monkeypatch.setattr(BatchRunner, "summarize", summarize_late)
    monkeypatch.setattr(BatchRunner, "close_step", close_and_tell)
    quick = ["workers=inproc", "cluster=cpu-1x1", ROWS, "data.heldout.limit=4", "batch=4"]
    summary = run("recipes/sft.py", tmp_path, *quick, "steps=3", "nodes.eval_gen.every=1")
    lines = (summary.directory / "metrics.jsonl").read_text().splitlines()
    rows = [("eval" if "eval_gen/accuracy" in row else "step", row["step"]) for row in map(json.loads, lines)]
    assert rows == [("eval", 0), *((kind, n) for n in (1, 2, 3) for kind in ("step", "eval"))]


def test_a_step_without_an_update_has_no_loss(tmp_path: Path) -> None:
    """Answers are empty, and no other token is learned."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "answer": ""}) + "\n" for i in range(8)))
    recipe = tmp_path / "unlearned.py"
    recipe.write_text(UNLEARNED)
    data = ["+model@models.actor=tiny-qwen2", "+data@data.train=addition", "models.actor.path=null"]
    data += ["data.train.generator=null", f"data.train.path={rows}"]
    summary = run(recipe, tmp_path, *data, "workers=inproc", "cluster=cpu-1x1", "steps=5", "batch=4")
    for row in steps_of(summary):
        assert row["learn/num_tokens"] == 0
        assert row.keys().isdisjoint({"learn/loss", "learn/grad_norm", "learn/lr"})
    assert "learn had no gradient in steps 1 to 5, so actor learns nothing" in summary.warnings[-1]
    report = read_report(str(summary.directory))
    assert "learn/loss" not in report.record.curves
    render_run_report(report)
    assert "learn/loss" not in render_run_page(report)


UNLEARNED = """
from dataclasses import replace

from hflow import Dataset, Model, Output, PerToken, Recipe, Text, Tokenizer, Trajectory, encode, train

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@encode(actor)
def view(tokenizer: Tokenizer, prompt: str, answer: str) -> Trajectory:
    told = tokenizer.join(prompt, answer)
    return replace(told, loss_mask=(False,) * len(told.loss_mask))


@train(actor, reduce="token-mean")
def learn(out: Output) -> PerToken:
    return -out.logprobs


recipe = Recipe("unlearned", data, [view, learn])
"""


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
    with pytest.raises(PlanError, match="is out of date: schedule steps: 2 -> 3"):
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


SMALL_PARTS = [
    "models.actor.tokens_per_microbatch=40",
    "models.actor.gen.max_running=3",
    "schedule.max_concurrent=16",
]


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "change",
    [["cluster=cpu-1x2"], SMALL_PARTS, *([part] for part in SMALL_PARTS)],
    ids=["two dp shards", "small parts", "tiny micro-batches", "small engine", "few in flight"],
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
        pytest.param("vllm", "torch", marks=pytest.mark.long),
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


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_model_has_no_output_matrix_of_its_own(checkpoint: Path, tmp_path: Path, equal: bool) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model, ignore=shutil.ignore_patterns("shards"))
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"]
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + (0.0 if equal else 0.01)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    overrides = [f"models.actor.path={model}", *INPROC]
    if equal:
        compile_recipe(ROOT / "recipes/sft.py", overrides)
        return
    with pytest.raises(ConfigError, match=r"but lm_head.weight differs from model.embed_tokens.weight. Set"):
        compile_recipe(ROOT / "recipes/sft.py", overrides)


def other_files(directory: Path) -> dict[str, bytes]:
    """Return the files of a model beside its weights, its architecture, and what hflow resumes from."""
    paths = {path.relative_to(directory): path for path in directory.rglob("*") if path.is_file()}
    return {
        str(name): path.read_bytes()
        for name, path in paths.items()
        if name.parts[0] != "shards" and path.suffix != ".safetensors" and name.name != "config.json"
    }


@pytest.mark.first(1)
@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_what_a_checkpoint_has_beside_its_weights_stays_as_it_is(
    checkpoint: Path, tmp_path: Path, backend: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model, ignore=shutil.ignore_patterns("shards"))
    end = AutoTokenizer.from_pretrained(model).eos_token_id
    added = {
        "generation_config.json": b'{"temperature": 0.6, "eos_token_id": [%d], "own": 1}' % end,
        "preprocessor_config.json": b"{ }\n",
        "modeling_own.py": b"raise SystemExit\n",
        "README.md": "\u00e9".encode("latin-1"),
        "additional_chat_templates/tools.jinja": b"{{ messages }}",
        "pytorch_model.bin": b"weights",
    }
    for name, content in added.items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(content)
    wanted = other_files(model)
    del wanted["pytorch_model.bin"]
    options = [f"models.actor.path={model}", f"models.actor.backend={backend}", "steps=1"]
    begun = run("recipes/sft.py", tmp_path, *options, *INPROC)
    saved = begun.directory / "checkpoints" / "latest" / "actor"
    assert other_files(saved) == wanted
    resume(str(begun.directory), ["steps=2"], live=False)
    assert other_files(saved) == wanted
    assert AutoModelForCausalLM.from_pretrained(saved).generation_config.temperature == 0.6
    export(str(begun.directory), tmp_path / "exported")
    assert other_files(tmp_path / "exported") == wanted
