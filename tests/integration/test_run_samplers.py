"""Samplers that choose the next row from earlier results: runs, a kill with its resume, and refusals."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from command_line import CommandLine

RECIPE = """
import os

from hflow import Dataset, Model, Recipe, Text, compute, nodes, rewards, sampler, use

train, heldout = Dataset("train", prompt=Text, answer=Text), Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@sampler
def near_worst(state, finished, position, order, *, first: int = 2):
    if position == 10 and "KILLED" in os.environ:
        os.kill(os.getpid(), 9)
    means = state.setdefault("means", {})
    for group in finished:
        means[str(group.row)] = group.mean
    if position < first or not means:
        return order.row(position), f"warm-up at {position}"
    row = min(means, key=lambda key: (means[key], int(key)))
    return (int(row) + position) % order.num_rows, f"near row {row} of mean {means[row]:.2f}"


@sampler
def beyond(state, finished, position, order):
    return 8, "the last one"


@sampler
def numbered(state, finished, position, order):
    state[position] = True
    return 0, ""


@sampler
def silent(state, finished, position, order):
    return 0


@compute(per="sample", returns="reward")
def score(completion: str) -> float:
    return sum(map(ord, completion)) % 5 / 4


@compute(per="group", returns="keep")
def has_spread(reward: list[float]) -> bool:
    return max(reward) > min(reward)


recipe = Recipe(
    "mine",
    train,
    [
        use(nodes.actor_gen, actor, group=2, max_tokens=4),
        use(nodes.actor_gen, actor, name="eval_gen", group=1, data=heldout, every=9, max_tokens=4),
        score,
        has_spread,
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
    ],
)
"""
YAML = """
defaults: [model@models.actor: tiny-qwen2, _self_]
models: {actor: {path: "hflow:addition"}}
data:
  train: {generator: addition, limit: 8, sampler: near_worst}
  heldout: {generator: addition, limit: 1, split: heldout}
batch: 3
steps: 4
save_every: 1
workers: inproc
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(RECIPE)
    file.with_suffix(".yaml").write_text(YAML)
    return file


def drawn(run: str) -> list[tuple[int, int, str]]:
    """The group, row and reason of each draw, the last one of a group that was opened again."""
    with closing(sqlite3.connect(Path("runs", run, "latest", "ledger.sqlite"))) as database:
        rows = database.execute(
            "SELECT DISTINCT group_id, i.row, reason FROM issued AS i "
            "JOIN drawn USING (stream, group_id, seq) "
            "ORDER BY seq"
        )
        return sorted({group: (group, row, reason) for group, row, reason in rows}.values())


@pytest.mark.long
def test_a_killed_run_draws_the_same_rows_when_it_resumes(recipe: Path, hflow: CommandLine) -> None:
    hflow.prints("run", recipe, "name=whole")
    whole = drawn("whole")
    assert whole[0][2] == "warm-up at 0"
    assert any(reason.startswith("near row") for *_, reason in whole)
    command = [sys.executable, "-m", "hflow", "run", str(recipe), "name=killed"]
    killed = subprocess.run(command, env={**os.environ, "KILLED": "1"}, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    hflow.prints("run", "--resume", "killed")
    assert drawn("killed") == whole
    assert "its row was chosen by the sampler: warm-up at 0" in hflow.prints("why", "killed", "0")
    assert "data.train.sampler: near_worst -> skip_settled" in hflow.refused(
        "run", "--resume", "killed", "steps=5", "data.train.sampler=skip_settled"
    )


def test_a_ready_made_sampler_without_rewards_is_refused(hflow: CommandLine) -> None:
    assert "data.train.sampler=skip_settled needs rewards, but no node returns one" in hflow.refused(
        "run", "sft", "data.train.sampler=skip_settled"
    )


@pytest.mark.parametrize("name", ["skip_settled", "difficulty_pools"])
def test_a_ready_made_sampler_draws_rows(recipe: Path, hflow: CommandLine, name: str) -> None:
    hflow.prints("plan", recipe, f"data.train.sampler={name}")
    hflow.prints("run", recipe, f"data.train.sampler={name}", "steps=2")
    assert all(0 <= row < 8 and reason for _, row, reason in drawn("mine"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.train.sampler=near_wors",
            "the recipe's @sampler: near_worst, beyond, numbered, silent); did you",
        ),
        (
            "data.train.sampler_arguments={last: 1}",
            "do not fit near_worst: got an unexpected keyword argument",
        ),
        (
            ["data.train.sampler=skip_settled", "data.train.sampler_arguments={rest: -1}"],
            "rest of skip_settled is -1; it must be 1 or more",
        ),
        (
            ["data.train.sampler=difficulty_pools", "data.train.sampler_arguments={easy_share: 2}"],
            "easy_share of difficulty_pools is 2; it must be 0 or more, and at most 1",
        ),
        ("+data.heldout.sampler=near_worst", "evaluations read every row once; remove it"),
        ("+data.heldout.sampler_arguments={a: 1}", "has no effect without data.heldout.sampler"),
    ],
)
def test_a_plan_refuses_what_does_not_fit(
    recipe: Path, hflow: CommandLine, override: str | list[str], message: str
) -> None:
    given = [override] if isinstance(override, str) else override
    for command in ("check", "plan"):
        assert message in hflow.refused(command, recipe, *given)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("beyond", "chose row 8; return one from 0 to 7"),
        ("numbered", "dicts whose keys are texts"),
        ("silent", "returned 0; return the row, an int, and a reason"),
    ],
)
def test_a_run_refuses_what_a_sampler_returns(
    recipe: Path, hflow: CommandLine, name: str, message: str
) -> None:
    error = hflow.fails("run", recipe, f"data.train.sampler={name}")
    assert f"data.train.sampler={name}" in error
    assert message in error


def test_a_function_with_other_parameters_is_no_sampler(recipe: Path, hflow: CommandLine) -> None:
    recipe.write_text(
        RECIPE.replace("def silent(state, finished, position, order)", "def silent(state, order)")
    )
    assert "@sampler needs the parameters (state, finished, position, order)" in hflow.refused(
        "check", recipe
    )
