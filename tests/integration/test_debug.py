"""`workers=debug`: a debugger in the body of a sample, with the terminal of the command.

`bodies.log`: what bodies print and log, in whatever process they run.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import forked_python
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


@pytest.fixture(params=["", pytest.param("async", marks=pytest.mark.long)])
def recipe(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(RECIPE.replace("ASYNC ", f"{request.param} ".lstrip()))
    file.with_suffix(".yaml").write_text(YAML)
    return file


def debugged(recipe: Path, typed: str) -> subprocess.CompletedProcess[str]:
    """Run a recipe, and type into its terminal. Not in this process, whose debugger pytest replaces."""
    command = [sys.executable, "-m", "hflow", "run", str(recipe), "workers=debug"]
    return forked_python.run(command, input=typed, capture_output=True, text=True)


def test_a_body_stops_at_its_breakpoint_and_has_no_time_limit(recipe: Path) -> None:
    ended = debugged(recipe, "p right in (0.0, 1.0), answer.isdigit()\nc\nc\n")
    assert ended.returncode == 0, ended
    assert "(Pdb) (True, True)" in ended.stdout
    assert "2 trained" in ended.stdout


@pytest.mark.long
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


PRINTING = """
import logging
from pathlib import Path

from hflow import Dataset, Engine, Model, PerSequence, Recipe, Text, Trajectory, compute, generate, nodes, use

logging.basicConfig(level=logging.INFO)
data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@generate(actor, group=2, max_tokens=4)
async def episode(engine: Engine, prompt: str) -> Trajectory:
    print("an episode of", prompt)
    return await engine.complete(prompt)


@compute(per="sample", timeout=60.0, retries=1, backoff=0.01, returns="reward")
def score(completion: str, answer: str) -> float:
    logging.getLogger("mine").info("answer %s", answer)
    if not Path("MARK").exists():
        Path("MARK").touch()
        raise ValueError("not yet")
    return 0.25


@compute(per="group", timeout=60.0, returns="spread")
async def spread(reward: list[float]) -> list[float]:
    print("many\\n" * 50)
    return reward


@compute(per="batch", returns="advantages")
def scale(spread: PerSequence) -> PerSequence:
    print("a batch")
    return spread


recipe = Recipe("mine", data, [episode, score, spread, scale, use(nodes.actor_train, actor, prox="none")])
"""


def test_what_bodies_print_is_in_the_run_and_a_part_of_it_in_the_terminal(
    tmp_path: Path, hflow: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "level", logging.INFO)  # pytest has handlers: basicConfig does nothing
    file = tmp_path / "mine.py"
    file.write_text(PRINTING.replace("MARK", str(tmp_path / "mark")))
    file.with_suffix(".yaml").write_text(YAML.replace("nodes: {actor_gen: {max_tokens: 4}}", ""))
    shown = hflow.prints("run", file, "workers=inproc")
    lines = Path("runs/mine/latest/bodies.log").read_text().splitlines()
    for printed in (
        "episode sample episode/0: an episode of ",
        "score sample episode/1: INFO:mine:answer ",
        "score sample episode/0: ValueError: not yet",
        "spread group episode/0: many",
        "scale step 1: a batch",
    ):
        assert any(f" worker 0 {printed}" in line for line in lines), lines
    assert sum(line.endswith(" spread group episode/0: many") for line in lines) == 50
    assert "episode, sample episode/0: an episode of " in shown
    assert "more lines of spread" in shown
    assert "Traceback" not in shown
    told = hflow.prints("why", "mine", "0")
    assert "Traceback" in told
    assert 'raise ValueError("not yet")' in told
    output = json.loads(hflow.prints("why", "mine", "0", "--json"))["output"]
    assert {line["node"] for line in output} == {"episode", "score", "spread"}
