"""`workers=debug`: a debugger in the body of a sample, with the terminal of the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import CommandLine

RECIPE = """
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", timeout=0.001, returns="reward")
ASYNC def score(completion: str, answer: str) -> float:
    right = float(completion.strip() == answer.strip())
    breakpoint()
    return 0.25


recipe = Recipe(
    "mine",
    data,
    [
        use(nodes.actor_gen, actor, group=2),
        score,
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
    ],
)
"""
YAML = """
defaults: [model@models.actor: tiny-qwen2, data@data.train: addition, _self_]
models: {actor: {path: "hflow:addition"}}
batch: 1
steps: 1
nodes: {actor_gen: {max_tokens: 4}}
schedule: {max_refused_per_step: 0}
"""


@pytest.fixture(params=["", "async"])
def recipe(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(RECIPE.replace("ASYNC ", f"{request.param} ".lstrip()))
    file.with_suffix(".yaml").write_text(YAML)
    return file


def debugged(recipe: Path, typed: str) -> subprocess.CompletedProcess[str]:
    """Run a recipe, and type into its terminal. Not in this process, whose debugger pytest replaces."""
    command = [sys.executable, "-m", "hflow", "run", str(recipe), "workers=debug"]
    return subprocess.run(command, input=typed, capture_output=True, text=True, check=False)


def test_a_body_stops_at_its_breakpoint_and_has_no_time_limit(recipe: Path) -> None:
    ended = debugged(recipe, "p right in (0.0, 1.0), answer.isdigit()\nc\nc\n")
    assert ended.returncode == 0, ended
    assert "(Pdb) (True, True)" in ended.stdout
    assert "2 trained" in ended.stdout


def test_quitting_the_debugger_ends_the_run(recipe: Path) -> None:
    ended = debugged(recipe, "q\n")
    assert ended.returncode == 2
    assert ended.stderr == "error: score was ended in the debugger\n"


def test_a_breakpoint_without_a_terminal_says_what_to_do(
    recipe: Path, hflow: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    recipe.write_text(recipe.read_text().replace("timeout=0.001", "timeout=5.0"))
    message = hflow.fails("run", recipe, "workers=inproc")
    assert "breakpoint() needs the terminal; run with workers=debug" in message
