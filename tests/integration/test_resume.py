"""Runs that end anywhere continue from their last checkpoint, as if they had not ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, TINY, largest_difference, run, weights_of
from safetensors.torch import load_file, save_file

from hflow import launch
from hflow.base.durable_files import file_checksum
from hflow.base.errors import ConfigError, PlanError, RunError
from hflow.config import to_yaml
from hflow.launch.checkpoints.fingerprints import read_inputs
from hflow.launch.planning.compile import compile_recipe, plan_file_text
from hflow.launch.running.resume import find_resumed
from hflow.launch.running.run_recipe import RunEnvironment, resume, run_compiled
from hflow.runtime.ledger.audit import audit
from hflow.runtime.records.run_summary import RunSummary
from hflow.runtime.records.sample_text_files import read_samples
from hflow.runtime.saving.run_directory import RunDirectory
from hflow.runtime.saving.saved_run import SavedRun, read_saved_run
from hflow.runtime.state.snapshot import (
    EvaluationSnapshot,
    GroupSnapshot,
    MemberSnapshot,
    RunSnapshot,
    StreamSnapshot,
)
from hflow.workers.ray.ray_actors import RayActors

RECIPE = "tests/integration/recipes/resumed.py"
COMMON = [
    *TINY,
    "+data@data.heldout=addition",
    "data.heldout.limit=6",
    "data.train.generator=null",
    "data.train.sources={small:{generator:addition,limit:12,weight:2},large:{generator:addition,limit:32}}",
    "nodes.eval_gen.max_tokens=4",
    "models.actor.optim.lr=1e-3",
    "models.critic.optim.lr=1e-3",
    "steps=5",
    "batch=8",
    "save_every=1",
    "keep_checkpoints=null",
]
INPROC = ["workers=inproc", "cluster=cpu-1x1"]
TIMES = (
    "time/",
    "busy/",
    "tokens_per_second",
    "samples_per_second",
    "rollout/",
    "seconds/",
    "memory",
    "/mfu",
)


def interrupted(summary: RunSummary, directory: Path, steps: int) -> Path:
    """Return a copy of a run in which everything after some step is not saved."""
    copy = directory / "interrupted"
    shutil.copytree(summary.directory, copy, symlinks=True)
    for path in (copy / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > steps:
            shutil.rmtree(path)
    return copy


def results(summary: RunSummary) -> dict[int, dict[str, Any]]:
    """Return step -> the metrics that do not measure time. The later row of a step counts."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (summary.directory / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        kept = {name: value for name, value in row.items() if not any(time in name for time in TIMES)}
        rows[row["step"]] = rows.get(row["step"], {}) | kept
    return rows


def texts_of(summary: RunSummary) -> dict[str, str]:
    """Return the files of the texts of samples."""
    return {path.name: path.read_text() for path in (summary.directory / "samples").iterdir()}


def ends_of(summary: RunSummary) -> list[dict[str, Any]]:
    """Return what happened to each sample, without times."""
    rows = launch.samples(str(summary.directory)).to_json()
    return [{name: value for name, value in row.items() if not name.endswith("_at")} for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    return run(RECIPE, tmp_path_factory.mktemp("undisturbed"), *COMMON, *INPROC)


def test_a_resumed_run_equals_the_undisturbed_one(undisturbed: RunSummary, tmp_path: Path):
    copy = interrupted(undisturbed, tmp_path, 2)
    resumed = resume(str(copy), live=False)
    assert (resumed.reason, resumed.steps, resumed.directory) == ("done", 5, copy)
    assert results(resumed) == results(undisturbed)
    assert texts_of(resumed) == texts_of(undisturbed)
    for model in ("actor", "critic"):
        assert largest_difference(weights_of(resumed, model), weights_of(undisturbed, model)) == 0
    assert resumed.sample_ends == undisturbed.sample_ends
    assert audit(copy / "ledger.sqlite") == []
    assert ends_of(resumed) == ends_of(undisturbed)


def test_the_last_checkpoint_of_a_finished_run_continues_with_more_steps(
    undisturbed: RunSummary, tmp_path: Path
):
    copy = interrupted(undisturbed, tmp_path, 5)
    with pytest.raises(ConfigError, match="has completed its 5 steps; to continue it, set more"):
        resume(str(copy), live=False)
    with pytest.raises(ConfigError, match="continues after step 5, so steps=4 leaves none; set more"):
        launch.resume(str(copy), ["steps=4"], live=False)
    longer = launch.resume(str(copy), ["steps=6", "keep_checkpoints=1"], live=False)
    assert (longer.reason, longer.steps) == ("done", 6)
    assert [path.name for path in (copy / "checkpoints").glob("step-*")] == ["step-6"]
    before = results(undisturbed)
    assert {step: row for step, row in results(longer).items() if step < 5} == {
        step: row for step, row in before.items() if step < 5
    }
    assert audit(copy / "ledger.sqlite") == []
    evaluated = {
        (row["stream"], row["id"]): row["step"]
        for row in launch.samples(str(copy)).to_json()
        if row["end"] == "evaluated"
    }
    told = [row for row in read_samples(copy / "samples") if row["root"] == "eval_gen"]
    assert told
    for row in told:  # the evaluation at the end came after the checkpoint, so its ids are given again
        assert evaluated[row["root"], row["id"]] == row["step"]


def test_learning_rates_fall_until_the_end_if_other_steps_follow(undisturbed: RunSummary, tmp_path: Path):
    """Half as many updates of the actor and the critic follow, whose rates now fall: 6 updates and then 2."""
    copy = interrupted(undisturbed, tmp_path, 3)
    decay = [f"models.{model}.optim.schedule=linear" for model in ("actor", "critic")]
    fewer = ["nodes.actor_train.minibatches=1", "nodes.critic_train.every=2"]
    resumed = resume(str(copy), [*decay, *fewer], live=False)
    rates = {
        step: (row.get("actor_train/lr"), row.get("critic_train/lr"))
        for step, row in results(resumed).items()
    }
    assert rates[4] == (pytest.approx(1e-3 * 2 / 8), None)
    assert rates[5] == (pytest.approx(1e-3 * 1 / 8), pytest.approx(1e-3 * 1 / 8))
    again = resume(str(interrupted(resumed, tmp_path / "again", 4)), live=False)
    assert results(again) == results(resumed)


@pytest.mark.first(1)
@pytest.mark.parametrize("num_rows", [4, 10])
def test_an_evaluation_with_other_rows_reads_all_of_them(
    undisturbed: RunSummary, tmp_path: Path, num_rows: int
):
    copy = interrupted(undisturbed, tmp_path, 3)
    resumed = resume(str(copy), [f"data.heldout.limit={num_rows}"], live=False)
    samples = launch.samples(str(copy)).to_json()
    for step in (4, 5):
        read = [row["row"] for row in samples if (row["end"], row["step"]) == ("evaluated", step)]
        assert sorted(read) == list(range(num_rows))
    assert audit(resumed.directory / "ledger.sqlite") == []


def test_an_evaluation_under_way_begins_again_with_other_rows():
    groups = tuple(GroupSnapshot(n, (MemberSnapshot(n, 2, ("eval",)),)) for n in (5, 6))
    streams = (StreamSnapshot("gen", 4, ()), StreamSnapshot("eval", 7, groups))
    evaluation = EvaluationSnapshot(first_group=3, active=2, last=2, formed=(0,), num_groups=None)
    snapshot = RunSnapshot(2, 0, streams, (("eval", evaluation),), ())
    saved = SavedRun(snapshot, 9, {}, (), (("eval", 5, "worker-0"), ("eval", 6, "worker-0")))
    assert saved.with_rows({"gen": 1, "eval": 4}) == saved
    fewer = saved.with_rows({"gen": 1, "eval": 3})
    assert fewer.snapshot.evaluations == (("eval", EvaluationSnapshot(7, None, 1, (0,), None)),)
    assert fewer.snapshot.streams == (streams[0], StreamSnapshot("eval", 7, ()))
    assert fewer.files == ()


@pytest.mark.parametrize("name", ["actor/model.safetensors", "state.json", "critic/shards/shards.json"])
def test_a_damaged_checkpoint_is_refused_and_an_older_one_can_be_named(
    undisturbed: RunSummary, tmp_path: Path, name: str
):
    copy = interrupted(undisturbed, tmp_path, 3)
    path = copy / "checkpoints" / "step-3" / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match=rf"step-3 is damaged: {name} does not have the content"):
        resume(str(copy), live=False)
    path.unlink()
    with pytest.raises(RunError, match=rf"step-3 is damaged: {name} is missing"):
        resume(str(copy), live=False)
    with pytest.raises(PlanError, match="cannot resume: setting seed: 0 -> 1"):
        resume(str(copy / "checkpoints" / "step-2"), ["seed=1"], live=False)


FORMAT_1 = ROOT / "tests/fixtures/checkpoint-format-1"
"""A checkpoint that an earlier version wrote in today's format. Write another one only for another format."""
OF_FORMAT_1 = [
    *("models.actor.path=null", "models.actor.gen.max_model_len=32", "workers=inproc", "cluster=cpu-1x2"),
    *("schedule.max_staleness=2", "batch=2", "steps=3", "nodes.eval_gen.after=1000", "data.heldout.limit=4"),
    *("models.actor.architecture.hidden_size=8", "models.actor.architecture.intermediate_size=16"),
    *("models.actor.architecture.num_hidden_layers=1", "models.actor.architecture.num_attention_heads=2"),
    "models.actor.architecture.num_key_value_heads=2",
]


@pytest.fixture
def of_format_1(tmp_path: Path) -> RunDirectory:
    compiled = compile_recipe(ROOT / "recipes/grpo_async.py", OF_FORMAT_1)
    run = RunDirectory.create(tmp_path, "grpo_async", to_yaml(compiled.config), plan_file_text(compiled))
    shutil.copytree(FORMAT_1, run.checkpoints / "step-2")
    return run


def test_a_checkpoint_of_an_earlier_version_continues(of_format_1: RunDirectory):
    resumed = resume(str(of_format_1.path), live=False)
    assert (resumed.reason, resumed.steps) == ("done", 3)
    assert resumed.sample_ends["trained"] == 16


BONUS = """
from hflow import compute


@compute(per="sample", returns="bonus")
def bonus(completion: str) -> float:
    return 1.0


recipe = Recipe("""


@pytest.mark.first(1)
@pytest.mark.parametrize("change", ["added", "removed", "other field"])
def test_accepted_samples_run_the_nodes_that_the_recipe_has_now(tmp_path: Path, change: str):
    plain = (ROOT / "recipes/grpo_async.py").read_text()
    score = 'name="score", returns="reward"),\n'
    bonus = plain.replace("\nrecipe = Recipe(", BONUS).replace(score, f"{score}        bonus,\n", 1)
    points = plain.replace('returns="reward"', 'returns="points"')
    points = points.replace(" nodes.group_adv", ' use(nodes.group_advantage, reads={"reward": "points"}), #')
    before, after, field = {
        "added": (plain, bonus, "bonus"),
        "removed": (bonus, plain, "reward"),
        "other field": (plain, points, "points"),
    }[change]
    recipe = tmp_path / "grpo_async.py"
    shutil.copy(ROOT / "recipes/grpo_async.yaml", tmp_path)
    recipe.write_text(before)
    compiled = compile_recipe(recipe, OF_FORMAT_1)
    own = RunDirectory.create(tmp_path, "grpo_async", to_yaml(compiled.config), plan_file_text(compiled))
    checkpoint = own.checkpoints / "step-2"
    shutil.copytree(FORMAT_1, checkpoint)
    state, manifest = checkpoint / "state.json", checkpoint / "manifest.json"
    if change == "removed":
        state.write_text(state.read_text().replace('"score"', '"score", "bonus"'))
    values = json.loads(state.read_text()) | {"outputs": {"score": ["actor_gen/reward"]}}
    state.write_text(json.dumps(values))
    listed = json.loads(manifest.read_text())
    listed["files"]["state.json"] = file_checksum(state)
    manifest.write_text(json.dumps(listed))
    saved = read_saved_run(checkpoint).snapshot.streams[0]
    assert [group.is_accepted for group in saved.groups] == [True, True]
    recipe.write_text(after)
    resumed = resume(str(own.path), live=False)
    assert (resumed.reason, resumed.steps, resumed.sample_ends["trained"]) == ("done", 3, 16)
    (row,) = (row for row in results(resumed).values() if "actor_train/num_tokens" in row)
    fields = {"reward", "bonus", "points"}
    assert {name for name in fields if f"actor_gen/{name}" in row} >= {field}
    assert change != "removed" or "actor_gen/bonus" not in row


@pytest.mark.parametrize(
    ("file", "change", "problem"),
    [
        ("manifest.json", lambda values: values.update(format=2), "has format 2, but this version of hflow"),
        ("state.json", lambda values: values["snapshot"].update(epoch=1), "epoch: unknown key"),
        ("state.json", lambda values: values["snapshot"].pop("streams"), "snapshot.streams: Field required"),
    ],
)
def test_a_checkpoint_of_a_later_version_is_refused(
    of_format_1: RunDirectory, file: str, change: Callable[[Any], Any], problem: str
):
    checkpoint = of_format_1.checkpoints / "step-2"
    values = json.loads((checkpoint / file).read_text())
    change(values)
    (checkpoint / file).write_text(json.dumps(values))
    if file == "state.json":
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest["files"][file] = file_checksum(checkpoint / file)
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=f"{problem}.*use the version of hflow that wrote it, or begin"):
        find_resumed(str(of_format_1.path))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, rows in two files, and a run of two steps; all paths are relative to this directory."""
    home = tmp_path_factory.mktemp("workplace")
    for name in ("base-1", "base-2"):
        shutil.copytree(FORMAT_1 / "actor", home / name)
    weights = load_file(home / "base-2" / "model.safetensors")
    save_file({name: 2 * x for name, x in weights.items()}, home / "base-2" / "model.safetensors")
    (home / "base").symlink_to("base-1")
    for name in ("train-1", "train-2", "heldout"):
        rows = ({"prompt": f"{number:02d}+01=", "answer": f"{number + 1:03d}"} for number in range(10, 18))
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["models.actor.path=base", "models.actor.gen.max_model_len=32", "nodes.actor_gen.max_tokens=4"]
    options += ["+data@data.train=addition", "data.train.generator=null", "data.train.path=train-*.jsonl"]
    options += [
        "+data@data.heldout=addition",
        "data.heldout.generator=null",
        "data.heldout.path=heldout.jsonl",
    ]
    options += ["nodes.eval_gen.max_tokens=4", "steps=2", "batch=8"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        run(RECIPE, Path("runs"), *options, *INPROC)
    return home


@pytest.fixture
def moved(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(workplace, tmp_path / "moved", symlinks=True)
    monkeypatch.chdir(tmp_path / "moved")
    return tmp_path / "moved"


def replaced(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda home: shutil.copy("heldout.jsonl", "train-3.jsonl"), "data.train .*/train-3.jsonl is new"),
        (lambda home: (home / "train-2.jsonl").unlink(), "data.train .*/train-2.jsonl is gone"),
        (
            lambda home: replaced(home / "train-1.jsonl", "13+01", "31+01"),
            "data.train .*/train-1.jsonl has other content. Put the files back",
        ),
        (
            lambda home: replaced(home / "base/tokenizer.json", '"9"', '"?"'),
            "models.actor .*/base-1/tokenizer.json has other content. Let the configured path lead to",
        ),
        (
            lambda home: shutil.copy("base-2/model.safetensors", "base-1/model.safetensors"),
            "models.ref .*/base-1/model.safetensors has other content",
        ),
    ],
)
def test_files_that_a_run_continues_with_must_be_what_they_were(
    moved: Path, change: Callable[[Path], Any], problem: str
):
    change(moved)
    with pytest.raises(ConfigError, match=f"cannot resume: {problem}"):
        resume("runs/resumed/latest", ["steps=3"], live=False)


def without_cuts(summary: RunSummary) -> list[str]:
    """Return a run's warnings, but that its answers of one token are cut."""
    return [warning for warning in summary.warnings if "ended at a limit of tokens" not in warning]


def test_a_model_is_found_again_when_its_link_leads_elsewhere(workplace: Path, moved: Path):
    (moved / "base").unlink()
    (moved / "base").symlink_to("base-2")
    origin = workplace / "base-1"
    with pytest.raises(ConfigError, match=f"models.ref is not .* set models.ref.path={origin}"):
        resume("runs/resumed/latest", ["steps=3"], live=False)
    resumed = resume("runs/resumed/latest", ["steps=3", f"models.ref.path={origin}"], live=False)
    assert (resumed.reason, resumed.steps, without_cuts(resumed)) == ("done", 3, [])


def test_other_rows_of_an_evaluation_are_warned_of_once(moved: Path):
    replaced(moved / "heldout.jsonl", "13+01", "31+01")
    resumed = resume("runs/resumed/latest", ["steps=3"], live=False)
    (warning,) = without_cuts(resumed)
    assert re.search(r"data.heldout is not what .*/heldout.jsonl has other content; results may", warning)
    assert without_cuts(resume("runs/resumed/latest", ["steps=4"], live=False)) == []


def test_overrides_without_effect_are_refused_or_warned_of(moved: Path):
    for override in ("out=elsewhere", "name=other"):
        with pytest.raises(ConfigError, match=f"{override} has no effect, as a run continues in its own"):
            find_resumed("runs/resumed/latest", ["steps=3", override])
    resumed = find_resumed("runs/resumed/latest", ["steps=3", "nodes.kl_reward.beta=0.5"])
    known = read_inputs(resumed.directory.inputs)
    assert known is not None
    (warning,) = resumed.check_inputs(lambda before: known)[1]
    assert re.search(r"kl_reward.beta: 0.05 -> 0.5, but kl_reward continues with its state, .*beta", warning)


def test_all_changes_are_listed(moved: Path):
    """Also those of settings that no plan has, and in a refusal those that would be allowed."""
    allowed = ["steps=3", "save_minutes=3", "models.actor.optim.lr=0.5", "schedule.max_concurrent=77"]
    new, same = find_resumed("runs/resumed/latest", allowed).change_notes()
    assert re.search(r"results differ .*setting models.actor.optim.lr: \S+ -> 0.5", new)
    assert re.search(
        r"same results: .*schedule max_concurrent: \d+ -> 77.*setting save_minutes: \S+ -> 3", same
    )
    assert "save_minutes" not in new
    assert "optim.lr" not in same
    with pytest.raises(PlanError) as refused:
        find_resumed("runs/resumed/latest", [*allowed, "seed=1", "data.train.shuffle=false"])
    refusal, _, others = str(refused.value).partition("Other changes, which are allowed: ")
    for name, text in (("seed: 0 -> 1", refusal), ("data.train.shuffle", refusal), ("optim.lr", others)):
        assert name in text
    assert "max_concurrent" in others
    assert "optim.lr" not in refusal


def test_a_manifest_without_an_entry_is_refused(moved: Path):
    manifest = moved / "runs/resumed/latest/checkpoints/step-2/manifest.json"
    values = json.loads(manifest.read_text())
    del values["files"]["actor/model.safetensors"]
    manifest.write_text(json.dumps(values))
    with pytest.raises(RunError, match=r"damaged: manifest.json does not have the content"):
        resume("runs/resumed/latest", ["steps=3"], live=False)


def test_a_run_that_still_goes_on_is_not_resumed(undisturbed: RunSummary, tmp_path: Path):
    copy = interrupted(undisturbed, tmp_path, 2)
    with RunDirectory(copy).locked(), pytest.raises(ConfigError, match=r"is still going \(process \d+\)"):
        resume(str(copy), live=False)


MEGATRON = [
    f"models.{model}.{setting}"
    for model in ("actor", "critic", "ref")
    for setting in ("backend=megatron", "layout=t2")
]
LAYOUTS = {
    "torch-d2": ["cluster=cpu-1x2"],
    "megatron-t2": ["cluster=cpu-1x2", *MEGATRON],
}


@pytest.mark.first(1)
@pytest.mark.ray
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_over_several_ranks_continues_bit_for_bit(
    layout: str, tmp_path: Path, two_processes: RayActors
):
    whole = run(RECIPE, tmp_path, *COMMON, *LAYOUTS[layout], "steps=3", processes=two_processes)
    copy = interrupted(whole, tmp_path, 1)
    resumed = resume(str(copy), live=False, environment=RunEnvironment(processes=two_processes))
    assert results(resumed) == results(whole)
    for model in ("actor", "critic"):
        assert largest_difference(weights_of(resumed, model), weights_of(whole, model)) == 0
    assert audit(copy / "ledger.sqlite") == []


@pytest.mark.ray
def test_a_run_continues_in_another_layout(undisturbed: RunSummary, tmp_path: Path, two_processes: RayActors):
    copy = interrupted(undisturbed, tmp_path, 3)
    environment = RunEnvironment(processes=two_processes)
    resumed = resume(str(copy), ["cluster=cpu-1x2", "workers=ray"], live=False, environment=environment)
    assert (resumed.reason, resumed.steps) == ("done", 5)
    assert largest_difference(weights_of(resumed), weights_of(undisturbed)) < 1e-4
    assert audit(copy / "ledger.sqlite") == []


def test_a_stopped_asynchronous_run_keeps_its_samples(tmp_path: Path):
    """Its second half begins with groups that were generated, or were being generated, in the first."""
    async_run = ["schedule.max_staleness=2", "steps=6", "save_minutes=0"]
    options = [
        "models.actor.path=null",
        *async_run,
        "workers=inproc",
        "nodes.eval_gen.after=1000",
        "data.heldout.limit=6",
        "batch=4",
    ]
    compiled = compile_recipe(ROOT / "recipes/grpo_async.py", [f"out={tmp_path}", *options])
    timer = threading.Thread(target=stop_after_step, args=(tmp_path, 2))
    timer.start()
    first = run_compiled(compiled, False)
    timer.join()
    assert (first.reason, first.steps >= 2) == ("stopped", True)
    saved = read_saved_run(first.directory / "checkpoints" / "latest")
    assert saved.snapshot.streams[0].groups
    copy = tmp_path / "synchronous"
    shutil.copytree(first.directory, copy, symlinks=True)
    resumed = resume(str(first.directory), live=False)
    assert (resumed.reason, resumed.steps) == ("done", 6)
    assert resumed.sample_ends["trained"] == 6 * 4 * 8
    assert audit(first.directory / "ledger.sqlite") == []
    synchronous = resume(str(copy), ["schedule.max_staleness=0"], live=False)
    lags = [row["staleness/max"] for step, row in results(synchronous).items() if step > first.steps]
    assert lags == [0.0] * (6 - first.steps)
    assert audit(copy / "ledger.sqlite") == []


def stop_after_step(out: Path, steps: int) -> None:
    """Send this process a Ctrl-C when a run has completed some steps."""
    for _ in range(1000):
        logs = list(out.glob("*/2*/metrics.jsonl"))
        if logs and sum("time/step_seconds" in line for line in logs[0].read_text().splitlines()) >= steps:
            break
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
