"""Ledgers of real runs: refusals, rewards that fail, a run that is stopped, one over Ray."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_python
import pytest
from rich.console import Console
from runs import ROOT, TINY, run, steps_of

from hflow import launch
from hflow.base.errors import ConfigError, RunError
from hflow.launch.results.runs import read_report
from hflow.report.html.run.view import story
from hflow.report.text.ledger import render_story
from hflow.report.text.summary import render_summary
from hflow.runtime.ledger import audit
from hflow.runtime.ledger.query import count, select
from hflow.runtime.ledger.sample_history import SampleHistory, read_history
from hflow.runtime.records.run_summary import RunSummary
from hflow.runtime.saving.run_directory import read_metrics
from hflow.workers.ray.ray_actors import RayActors

RECIPE = '''"""A reward that fails on some samples, and a filter."""

from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

train = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns=("tries", "reward"))
def score(completion: str, prompt: str) -> tuple[int, float]:
    if prompt[1] in "37":
        raise KeyError(prompt)
    return 1, 1.0 + len(completion)


@compute(per="group", returns="keep")
def is_chosen(prompt: list[str]) -> bool:
    return prompt[0][0] != "9"


@compute(per="sample", returns="width")
def wide(completion: str) -> float:
    return float(len(completion))


recipe = Recipe(
    "picky",
    train,
    [
        use(nodes.actor_gen, actor, group=2),
        score,
        is_chosen,
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=2, temperature=0.0),
        use(wide, on="eval_gen"),
    ],
)
'''
ASKED = [
    *TINY,
    "+data@data.heldout=addition",
    "data.heldout.limit=6",
    "batch=4",
    "nodes.eval_gen.max_tokens=4",
]
INPROC = ["workers=inproc", "cluster=cpu-1x1"]


def picky(directory: Path, *overrides: str, processes: RayActors | None = None) -> RunSummary:
    recipe = directory / "picky.py"
    recipe.write_text(RECIPE)
    return run(recipe, directory / "runs", *ASKED, *overrides, processes=processes)


def check(summary: RunSummary, steps: int) -> Path:
    """What holds for every finished run of the recipe; its ledger."""
    ledger = summary.directory / "ledger.sqlite"
    assert audit(ledger) == []
    ends = json.loads((summary.directory / "summary.json").read_text())["samples"]
    assert ends == summary.sample_ends
    assert sum(ends.values()) == count(ledger)
    assert ends["trained"] == steps * 4 * 2
    assert count(ledger, "end = 'trained' and (reward is null or reward < 1)") == 0
    return ledger


def check_texts(summary: RunSummary, story: SampleHistory) -> None:
    """Every batch has eight samples and every evaluation six, so the texts of all were kept."""
    run = str(summary.directory)
    files = (summary.directory / "samples").iterdir()
    steps = {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in files}
    refused = [row for rows in steps.values() for row in rows if "refused_by" in row]
    assert {name: sum("refused_by" not in row for row in rows) for name, rows in steps.items()} == {
        "step-0.jsonl": 6,
        "step-1.jsonl": 8,
        "step-2.jsonl": 14,
        "step-3.jsonl": 14,
    }
    found = launch.samples_with_text(run, "reward > 1", 3)
    assert (len(found.samples.rows), found.samples.total) == (3, found.total)
    check_hundreds(summary)
    for sample in launch.samples_with_text(run, "end = 'trained'").to_json():
        prompt, answer = sample["texts"]["actor_gen"]
        assert (prompt["role"], prompt["trained"]) == ("user", False)
        assert re.fullmatch(r"<bos>\d\d\+\d\d=", prompt["text"])
        assert (answer["role"], answer["trained"]) == ("assistant", True)
        # The model's vocabulary is larger than the tokenizer's: some tokens have no text.
        assert 0 <= len(re.findall(r"<\w+>|.", answer["text"])) <= sample["tokens"]
    check_refused_texts(summary, refused)
    (row,) = launch.why_texts(run, story)
    assert row["values"]["reward"] == story.sample["reward"]
    assert row["values"]["advantages"] == pytest.approx(0, abs=2)


def check_hundreds(summary: RunSummary) -> None:
    """No more texts are read than the limit needs, and all without one, wherever they are."""
    run = str(summary.directory)
    whole = launch.samples_with_text(run)
    last = summary.directory / "samples" / "step-3.jsonl"
    moved = last.with_name("step-103.jsonl")
    last.rename(moved)
    try:
        parts, some = launch.samples_with_text(run), launch.samples_with_text(run, limit=3)
    finally:
        moved.rename(last)
    assert {row["id"] for row in parts.to_json()} == {row["id"] for row in whole.to_json()}
    assert (parts.samples.total, parts.samples.is_exact) == (whole.samples.total, True)
    assert (len(some.samples.rows), some.samples.is_exact, some.total) == (3, False, whole.total)
    assert 3 < some.samples.total < whole.samples.total


def check_refused_texts(summary: RunSummary, refused: list[dict[str, Any]]) -> None:
    """Each is one of its group, and what the ledger says of it is what refused it."""
    assert {row["refused_by"] for row in refused} == {"score", "is_chosen"}
    assert len({(row["root"], row["group"]) for row in refused}) == len(refused)
    found = launch.samples_with_text(str(summary.directory), "end = 'refused'").to_json()
    assert {(row["stream"], row["id"], row["node"]) for row in found} == {
        (row["root"], row["id"], row["refused_by"]) for row in refused
    }
    assert all(("reward" in row["values"]) == (row["refused_by"] == "is_chosen") for row in refused)
    for row in found:
        failed_digit = row["texts"]["actor_gen"][0]["text"][len("<bos>") + 1] in "37"
        assert failed_digit == (row["node"] == "score")


def test_an_evaluation_counts_the_samples_that_its_mean_lacks(tmp_path: Path):
    body = "def wide(completion: str, prompt: str) -> float:\n    assert prompt[0] not in '123'\n"
    (tmp_path / "picky.py").write_text(RECIPE.replace("def wide(completion: str) -> float:\n", body))
    summary = run(tmp_path / "picky.py", tmp_path / "runs", *ASKED, *INPROC, "steps=2")
    refused = count(summary.directory / "ledger.sqlite", "stream = 'eval_gen' and \"end\" = 'refused'")
    rows = read_metrics(summary.directory / "metrics.jsonl")
    numbers = [row["eval_gen/refused"] for row in rows if "eval_gen/refused" in row]
    assert len(numbers) == 2, "one for each evaluation"
    assert sum(number or 0 for number in numbers) == refused
    assert 0 < refused < 12
    assert numbers[-1] is not None
    evaluated = [row["eval_gen/evaluated"] for row in rows if "eval_gen/evaluated" in row]
    assert sum(number or 0 for number in (*numbers, *evaluated)) == 12, "two evaluations of six rows"
    lacks = f"{numbers[-1]:.0f} of 6 samples were not evaluated"
    assert summary.not_evaluated == {"eval_gen": (numbers[-1], 6)}
    assert f"warning: eval_gen after step 0: {numbers[0] or 0:.0f} of 6 samples" in summary.warnings[0]
    assert "picky.py:" in summary.warnings[0]
    console = Console(width=200)
    with console.capture() as shown:
        console.print(render_summary(summary))
    assert lacks in shown.get()
    assert any(lacks in line for line in story(read_report(str(summary.directory))))


def test_failed_rewards_and_filtered_groups_are_refused_with_their_reasons(tmp_path: Path):
    summary = picky(tmp_path, *INPROC, "steps=3")
    ledger = check(summary, 3)
    assert summary.sample_ends["evaluated"] == 6 * 3
    assert "unused" not in summary.sample_ends
    failed = select(ledger, "reason = 'failed'").to_json()
    assert failed
    assert {row["node"] for row in failed} == {"score"}
    assert all("KeyError" in row["message"] and "picky.py:13" in row["message"] for row in failed)
    assert all(row["reward"] is None for row in failed)
    assert all(row["place"].partition(":")[0].endswith("picky.py") for row in failed)
    assert count(ledger, "reason = 'keep' and node = 'is_chosen' and reward >= 1") > 0
    trained = select(ledger, "end = 'trained'", limit=1).to_json()[0]
    story = read_history(ledger, str(trained["id"]))
    assert story.dataset == "train"
    assert story.segments == ((trained["oldest"], trained["tokens"]),)
    assert [(held.version, held.replica) for held in story.weights] == [(trained["oldest"], "actor@gen")]
    assert len(story.weights[0].digest) == 16
    assert next((node.node, node.field) for node in story.computed) == ("score", "reward")
    assert trained["issued_at"] <= trained["finished_at"] <= trained["accepted_at"] <= trained["ended_at"]
    check_texts(summary, story)
    versions = {row["step"] for row in select(ledger, "stream = 'eval_gen'").to_json()}
    assert versions == {0, 2, 3}
    assert count(ledger, "stream = 'eval_gen' and (lag <> 0 or reward is null)") == 0


POOR_ADVANTAGE = """
@compute(returns="advantages")
def adv(reward: PerSequence) -> PerSequence:
    return reward.masked_fill(reward == 100, float("nan"))


recipe ="""


def test_samples_of_skipped_updates_are_named(tmp_path: Path):
    """One of two minibatches has an advantage that is not finite; the other is trained."""
    poor = RECIPE.replace("raise KeyError(prompt)", "return 1, 100.0").replace(
        "nodes.group_advantage,", "adv,"
    )
    poor = poor.replace("import Dataset", "import Dataset, PerSequence").replace("recipe =", POOR_ADVANTAGE)
    poor = poor.replace('prox="none"', 'prox="none", minibatches=4').replace("picky", "poor")
    (tmp_path / "poor.py").write_text(poor)
    skips = "models.actor.optim.on_nonfinite=skip"
    summary = run(tmp_path / "poor.py", tmp_path / "runs", *ASKED, *INPROC, "steps=2", skips)
    ledger = summary.directory / "ledger.sqlite"
    num_updates = sum(row.get("actor_train/skipped_updates", 0) for row in steps_of(summary))
    assert 0 < num_updates < 8
    assert count(ledger, "end = 'trained' and reason = 'nonfinite'") == 2 * num_updates
    assert count(ledger, "end = 'trained' and reason is null and reward is null") == 0
    assert any("actor_train skipped an update of step" in warning for warning in summary.warnings)
    assert audit(ledger) == []


@pytest.mark.ray
def test_a_run_over_ray_has_a_ledger_too(tmp_path: Path, two_processes: RayActors):
    summary = picky(tmp_path, "steps=2", "cluster=cpu-1x2", processes=two_processes)
    ledger = check(summary, 2)
    texts = launch.samples_with_text(str(summary.directory), "end = 'trained'").to_json()
    assert {row["worker"] for row in texts} == {0, 1}
    assert all(row["texts"]["actor_gen"][0]["text"].startswith("<bos>") for row in texts)
    assert {row["worker"] for row in select(ledger, "end = 'trained'").to_json()} == {0, 1}
    assert count(ledger, "reason = 'failed' and message is not null") > 0


def test_a_run_with_too_many_refusals_leaves_a_consistent_ledger(tmp_path: Path):
    with pytest.raises(RunError, match="groups were refused"):
        picky(tmp_path, *INPROC, "steps=3", "schedule.max_refused_per_step=0")
    (ledger,) = (tmp_path / "runs").glob("picky/2*/ledger.sqlite")
    assert audit(ledger) == []
    assert count(ledger, "end is null") == 0
    assert count(ledger, "end = 'unused' and reason = 'failed'") > 0
    texts = launch.samples_with_text(str(ledger.parent), "stream = 'actor_gen'").to_json()
    assert {text["end"] for text in texts} == {"refused"}, "one can read why no batch was formed"
    shutil.rmtree(ledger.parent / "samples")
    with pytest.raises(
        ConfigError, match=r"has no texts of samples .*; run the recipe with report.samples=8"
    ):
        launch.samples_with_text(str(ledger.parent))


def test_a_stopped_run_leaves_a_consistent_ledger(tmp_path: Path):
    (tmp_path / "picky.py").write_text(RECIPE)
    command = [sys.executable, "-m", "hflow", "run", str(tmp_path / "picky.py"), f"out={tmp_path}"]
    child = forked_python.Popen(
        [*command, *ASKED, *INPROC, "steps=100000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if re.match(r"step [1-9]", line):
            break
    os.killpg(child.pid, signal.SIGINT)
    rest = child.stdout.read()
    assert child.wait(120) == 75, rest
    (ledger,) = tmp_path.glob("picky/2*/ledger.sqlite")
    assert audit(ledger) == []
    assert count(ledger, "end is null") == 0
    assert count(ledger, "end = 'unused' and reason <> 'stopped'") == 0
    summary = json.loads((ledger.parent / "summary.json").read_text())
    assert summary["samples"]["trained"] == summary["steps"] * 4 * 2
    assert " trained, " in rest


JUDGED = [
    *TINY[1:],
    "+model@models.actor=tiny-qwen2",
    "+model@models.rm=tiny-qwen2",
    "+data@data.heldout=addition",
    "models.rm.path=null",
    "data.heldout.limit=6",
    "batch=4",
]


def judged(out: Path, *overrides: str, processes: RayActors | None = None) -> RunSummary:
    recipe = "tests/integration/recipes/judged.py"
    return run(recipe, out, *JUDGED, "steps=2", *overrides, processes=processes)


def check_rewards(summary: RunSummary) -> Path:
    """Rewards in the ledger are those that the metrics are means of; the ledger."""
    ledger = summary.directory / "ledger.sqlite"
    assert audit(ledger) == []
    for row in steps_of(summary):
        rewards = [s["reward"] for s in select(ledger, f"step = {row['step']} and end = 'trained'").to_json()]
        assert len(set(rewards)) > 1
        assert sum(rewards) / len(rewards) == pytest.approx(row["actor_gen/reward"])
    rows = read_metrics(summary.directory / "metrics.jsonl")
    evaluated = {row["step"]: row["eval_gen/reward"] for row in rows if "eval_gen/reward" in row}
    for step, mean in evaluated.items():
        rewards = [s["reward"] for s in select(ledger, f"step = {step} and end = 'evaluated'").to_json()]
        assert sum(rewards) / len(rewards) == pytest.approx(mean)
    assert sorted(evaluated) == [0, 2]
    return ledger


def test_rewards_of_batch_nodes_are_in_the_ledger(tmp_path: Path) -> None:
    ledger = check_rewards(judged(tmp_path, *INPROC))
    first = select(ledger, "end = 'trained'", limit=1).to_json()[0]
    assert count(ledger, f"reward > {first['reward']}") + count(ledger, f"reward <= {first['reward']}") == 28
    story = read_history(ledger, str(first["id"]))
    told = {node.field: node.value for node in story.computed if node.field}
    assert told == {
        "rm_score": pytest.approx(first["reward"] + 0.25 * first["tokens"]),
        "reward": first["reward"],
    }
    shown = "".join(part.text for part in Console(width=120).render(render_story(story)))
    happened = ["issued", "generated", "accepted", "bound", "rew_inf", "total", "trained"]
    assert [shown.index(f"  {word}  ") for word in happened] == sorted(
        shown.index(f"  {w}  ") for w in happened
    )
    held_out = select(ledger, "stream = 'eval_gen'", limit=1).to_json()[0]
    evaluated = read_history(ledger, f"eval_gen/{held_out['id']}")
    assert [(node.node, node.field) for node in evaluated.computed] == [("eval_inf", "reward")]


@pytest.mark.ray
def test_every_rank_reports_its_own_samples(tmp_path: Path, two_processes: RayActors) -> None:
    check_rewards(judged(tmp_path, "cluster=cpu-1x2", processes=two_processes))


ASYNC = [
    "models.actor.path=null",
    "steps=6",
    "batch=4",
    "data.heldout.limit=6",
    "nodes.actor_gen.max_tokens=24",
]


def test_the_ledger_of_a_run_ahead_agrees_with_its_metrics(tmp_path: Path) -> None:
    """Lags of the samples that a step trained, against those that the step reported."""
    schedule = ["schedule.max_staleness=4", "schedule.drop_older_than=2", "workers=inproc"]
    summary = run("recipes/grpo_async.py", tmp_path, *ASYNC, *schedule)
    ledger = summary.directory / "ledger.sqlite"
    assert audit(ledger) == []
    for row in steps_of(summary):
        trained = select(ledger, f"end = 'trained' and step = {row['step']}").to_json()
        assert len(trained) == row["batch/samples"]
        for column, metric in (("lag", "mean"), ("in_flight_lag", "in_flight"), ("in_queue_lag", "in_queue")):
            lags = [sample[column] for sample in trained]
            assert sum(lags) / len(lags) == pytest.approx(row[f"staleness/{metric}"]), column
    assert count(ledger, "end = 'trained' and lag > 2") == 0


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("recipe", "changes", "judge"),
    [
        ("self_play", ["models.alice.path=null", "models.bob.path=null"], "alice_reward"),
        ("tool_agent", ["models.actor.path=null"], "agent"),
    ],
)
def test_ledgers_of_agents(tmp_path: Path, recipe: str, changes: list[str], judge: str) -> None:
    """Several trajectories of one episode; rewards that the episode itself gives."""
    small = [*INPROC, "steps=2", "batch=2", "data.heldout.limit=4", *changes]
    summary = run(f"recipes/{recipe}.py", tmp_path, *small)
    ledger = summary.directory / "ledger.sqlite"
    assert audit(ledger) == []
    num_ended = num_trained = 0.0  # the next step's episodes may end before a step is reported
    for row in steps_of(summary):
        num_ended += row["episodes/terminated"]
        num_trained += row["batch/samples"]
        assert num_ended >= num_trained
        assert row["episodes/generating"] >= 0
    trained = select(ledger, "end = 'trained'").to_json()
    assert len(trained) == 2 * 2 * 8
    assert all(sample["reward"] is not None for sample in trained)
    story = read_history(ledger, str(trained[0]["id"]))
    (told,) = [node.value for node in story.computed if (node.node, node.field) == (judge, "reward")]
    assert told == trained[0]["reward"]
    assert sum(tokens for _, tokens in story.segments) == trained[0]["tokens"]
