"""`hflow eval` and `export` on what a run has saved: whole datasets, once, and plain Hugging Face files."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from command_line import CommandLine
from runs import ROOT, TINY, run
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hflow.base.errors import ConfigError, HflowError, PlanError, RunError
from hflow.config import load_config
from hflow.dsl import load_recipe
from hflow.launch import simulate
from hflow.launch.checkpoints.evaluate import (
    EvaluationOptions,
    EvaluationReport,
    _with_saved_models,
    evaluate,
)
from hflow.launch.checkpoints.export import export
from hflow.runtime.ledger import audit
from hflow.runtime.ledger.query import select
from hflow.runtime.ledger.schema import COLUMNS
from hflow.runtime.saving.run_directory import read_metrics

RECIPE = """
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def odd(completion: str) -> float:
    return 0.7 * (len(completion) % 2)


recipe = Recipe("odd", data, [
    use(nodes.actor_gen, actor, group=2), odd, nodes.group_advantage,
    use(nodes.actor_train, actor, prox="none"),
    use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=50, temperature=0.0),
    use(odd, name="is_odd", on="eval_gen", returns="is_odd"),
])
"""
ONLY_SCORES = 'recipe = Recipe("scores", data, [use(nodes.actor_gen, actor, group=2), odd])'
ROWS = 7


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one step."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "odd.py").write_text(RECIPE)
    overrides = [
        *TINY,
        "+data@data.heldout=addition",
        f"data.heldout.limit={ROWS}",
        "nodes.eval_gen.max_tokens=4",
    ]
    return run(folder / "odd.py", folder, *overrides, "steps=1", "batch=2", "workers=inproc").directory


@pytest.fixture(scope="module")
def report(trained: Path) -> EvaluationReport:
    return evaluate(
        str(trained), ["data.train.generator=null"], EvaluationOptions(num_samples=4, threshold=0.7), False
    )


def test_every_row_is_scored_once_greedy_and_sampled(report: EvaluationReport) -> None:
    greedy, sampled = report.streams
    assert (greedy.stream, greedy.num_prompts, greedy.num_samples) == ("eval_gen", ROWS, ROWS)
    assert (sampled.stream, sampled.num_prompts, sampled.num_samples) == ("eval_gen_sampled", ROWS, 4 * ROWS)
    assert [field.field for field in greedy.fields] == ["is_odd"]
    assert greedy.fields[0].pass_at == {}
    assert list(sampled.fields[0].pass_at) == [1, 2, 4]
    assert report.steps == 1
    assert json.loads(report.file.read_text())["streams"][1]["num_samples"] == 4 * ROWS


def test_the_scores_are_those_of_the_ledger(report: EvaluationReport) -> None:
    ledger = Path(report.directory) / "ledger.sqlite"
    assert audit(ledger) == []
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in select(ledger).rows]
    assert {row["end"] for row in rows} == {"evaluated"}
    prompts: dict[int, list[float]] = {}
    for row in rows:
        if row["stream"] == "eval_gen_sampled":
            prompts.setdefault(row["row"], []).append(row["reward"])
    (score,) = report.streams[1].fields
    assert score.mean == pytest.approx(statistics.fmean(map(statistics.fmean, prompts.values())))
    assert score.mean == pytest.approx(report.metrics["eval_gen_sampled/is_odd"])
    assert 0 < score.mean < 0.7, "or the test shows nothing"
    assert 0.7 in {value for values in prompts.values() for value in values}, "not 0.699999988"
    assert score.pass_at[1] == pytest.approx(score.mean / 0.7)
    assert score.pass_at[4] == statistics.fmean(max(values) == 0.7 for values in prompts.values())
    assert score.pass_at[1] <= score.pass_at[2] <= score.pass_at[4]


def test_the_command_prints_a_table(trained: Path, hflow: CommandLine) -> None:
    saved = trained / "checkpoints" / "latest" / "actor"
    overrides = ("nodes.eval_gen.group=2", "nodes.eval_gen.temperature=0.5")
    out = hflow.prints("eval", saved, "--plain", *overrides)
    row = next(line for line in out.splitlines() if line.startswith("eval_gen"))
    assert row.split()[:4] == ["eval_gen", str(ROWS), str(2 * ROWS), "is_odd"]
    assert "after 1 step" in out


def test_a_recipe_that_learns_nothing_scores_every_row_once(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(RECIPE.partition("recipe =")[0] + ONLY_SCORES)
    overrides = [*TINY, f"data.train.limit={ROWS}", "workers=inproc", "steps=9"]
    summary = run(tmp_path / "scores.py", tmp_path, *overrides)
    assert (summary.steps, dict(summary.sample_ends)) == (0, {"evaluated": 2 * ROWS})
    (row,) = read_metrics(summary.directory / "metrics.jsonl")
    assert row["step"] == 0
    assert summary.values == {"reward": row["actor_gen/reward"]}
    with pytest.raises(PlanError, match="learns nothing, so it has no steps to simulate"):
        simulate(tmp_path / "scores.py", overrides)


def test_an_export_is_a_plain_directory(trained: Path, tmp_path: Path) -> None:
    saved = trained / "checkpoints" / "latest" / "actor"
    export(str(trained), tmp_path / "same")
    done = export(str(saved), tmp_path / "half", dtype="bf16")
    assert done.dtype == "bfloat16"
    assert not (tmp_path / "half" / "shards").exists()
    original = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    same = AutoModelForCausalLM.from_pretrained(tmp_path / "same").state_dict()
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").state_dict()
    assert all(torch.equal(value, same[name]) for name, value in original.items())
    assert all(torch.equal(value.bfloat16(), half[name]) for name, value in original.items())
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert AutoTokenizer.from_pretrained(tmp_path / "half").get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ConfigError, match="exists; name a new directory"):
        export(str(trained), tmp_path / "same")


def test_an_export_names_every_stop_token(trained: Path, tmp_path: Path) -> None:
    """Other programs read generation_config.json, and config.json only where there is none."""
    saved = tmp_path / "actor"
    shutil.copytree(trained / "checkpoints" / "latest" / "actor", saved)
    config = json.loads((saved / "config.json").read_text())
    before = b'{"temperature": 0.6, "eos_token_id": %d}' % config["eos_token_id"]
    (saved / "generation_config.json").write_bytes(before)
    export(str(saved), tmp_path / "same")
    assert (tmp_path / "same" / "generation_config.json").read_bytes() == before
    (saved / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, 5]}))
    export(str(saved), tmp_path / "more")
    assert GenerationConfig.from_pretrained(tmp_path / "more").eos_token_id == [2, 5]


def test_a_model_that_started_from_a_saved_one_keeps_its_chat_template() -> None:
    recipe = ROOT / "recipes/ppo.py"
    config = load_config(recipe, ["models.actor.chat_template='{{ messages }}'"])
    models = _with_saved_models(config, config, load_recipe(recipe).spec(), {"actor": Path("saved")}).models
    first = config.models["actor"]
    assert models["actor"].path == "saved"
    assert (models["ref"].path, models["ref"].chat_template) == (first.path, "{{ messages }}")


def test_a_damaged_checkpoint_is_not_exported(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy, symlinks=True)
    weights = copy / "checkpoints" / "latest" / "actor" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(RunError, match=r"actor/model\.safetensors does not have the content"):
        export(str(copy), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [copy], "nothing is left behind"


def test_bad_input_is_one_line(trained: Path, tmp_path: Path) -> None:
    plain = tmp_path / "model"
    export(str(trained), plain)
    recipe = str(trained.parents[1] / "odd.py")
    cases = [
        (str(tmp_path / "none"), [], EvaluationOptions(), "there is no checkpoint or run"),
        (str(plain), [], EvaluationOptions(), "in no run's directory; name the recipe"),
        (str(plain), [], EvaluationOptions(recipe=recipe, model="critic"), "no model 'critic'"),
        (str(trained), [], EvaluationOptions(streams=("eval",)), "did you mean 'eval_gen'"),
        (str(trained), [], EvaluationOptions(pass_at=(4,)), "draw more with --samples 4"),
        (str(trained), ["nodes.eval_gen.group=2"], EvaluationOptions(), "temperature 0, which are equal"),
        (str(trained), ["nodes.eval_gn.group=2"], EvaluationOptions(), "did you mean 'nodes.eval_gen'"),
        (
            str(trained),
            ["models.actor.optim.lr=1e-3"],
            EvaluationOptions(),
            "no node trains actor; remove it",
        ),
    ]
    for target, overrides, options, message in cases:
        with pytest.raises(HflowError, match=message):
            evaluate(target, overrides, options, False)
    with pytest.raises(ConfigError, match="no model 'critic'"):
        export(str(trained), tmp_path / "out", model="critic")
