"""A run on the rows that a function of the recipe yields without end, and its resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CommandLine

RECIPE = """
from random import Random

from hflow import Dataset, Model, Recipe, Text, nodes, rewards, rows, use

train, heldout = Dataset("train", prompt=Text, answer=Text), Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@rows
def sums(split: str, digits: int):
    random = Random(split)
    while True:
        one, other = random.randrange(10**digits), random.randrange(10**digits)
        yield {"prompt": f"{one:02d}+{other:02d}=", "answer": f"{one + other:03d}"}


recipe = Recipe(
    "mine",
    train,
    [
        use(nodes.actor_gen, actor, group=2, max_tokens=4),
        use(nodes.actor_gen, actor, name="eval_gen", group=1, data=heldout, every=9, max_tokens=4),
        use(rewards.exact, name="score", returns="reward"),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
    ],
)
"""
YAML = """
defaults: [model@models.actor: tiny-qwen2, _self_]
models: {actor: {path: "hflow:addition"}}
data:
  train: {generator: sums, arguments: {digits: 2}}
  heldout: {generator: sums, arguments: {digits: 2}, split: heldout, limit: 3}
batch: 2
steps: 1
workers: inproc
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(RECIPE)
    file.with_suffix(".yaml").write_text(YAML)
    return file


def test_a_run_reads_them_in_their_order_and_resumes_at_its_position(
    recipe: Path, hflow: CommandLine
) -> None:
    hflow.prints("run", recipe)
    hflow.prints("run", "--resume", "mine", "steps=3")
    samples = json.loads(hflow.prints("samples", "mine", "--json"))
    trained = [sample["row"] for sample in samples if sample["end"] == "trained"]
    assert trained == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert {sample["row"] for sample in samples if sample["end"] == "evaluated"} == {0, 1, 2}


@pytest.mark.long
def test_an_evaluation_reads_them(recipe: Path, hflow: CommandLine) -> None:
    hflow.prints("run", recipe)
    assert "accuracy" in hflow.prints("eval", "mine")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.heldout.limit=null", "evaluations read all rows; set data.heldout.limit"),
        ("data.train.generator=sum", "the recipe's @rows: sums); did you mean 'sums'"),
        ("+data.train.arguments.size=3", "data.train.arguments do not fit sums(split: str, digits: int)"),
    ],
)
def test_what_does_not_fit_is_refused(recipe: Path, hflow: CommandLine, override: str, message: str) -> None:
    assert message in hflow.refused("run", recipe, override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train.generator=sum"], "data.train.generator: there is no generator 'sum'"),
        (["+data.train.arguments.size=3"], "data.train.arguments do not fit sums(split: str, digits: int)"),
        (
            ["data.train.generator=addition"],
            "takes neither a task nor arguments",
        ),
    ],
)
def test_a_plan_knows_it_too(recipe: Path, hflow: CommandLine, overrides: list[str], message: str) -> None:
    for command in ("check", "plan"):
        assert message in hflow.refused(command, recipe, *overrides)
