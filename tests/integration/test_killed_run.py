"""A run that was resumed and then killed: what is said of it afterwards."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import forked_python
import pytest
from command_line import CommandLine

from hflow.launch.results.runs import read_trace
from hflow.runtime.records.activity import read_activity

RECIPE = """
import os
import signal
import time
from pathlib import Path

from hflow import Dataset, Model, PerSequence, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(returns="advantages")
def advantage(reward: PerSequence) -> PerSequence:
    if Path("kill").exists():
        wanted = {"trace.json": "score", "activity.json": "advantage"}  # written every second and half second
        files = {Path("runs/mine/latest", name): text for name, text in wanted.items()}
        for _ in range(1000):
            if all(file.exists() and text in file.read_text() for file, text in files.items()):
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return reward


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


recipe = Recipe(
    "mine", data, [use(nodes.actor_gen, actor), score, advantage, use(nodes.actor_train, actor, prox="none")]
)
"""
YAML = """
defaults: [model@models.actor: tiny-qwen2, data@data.train: addition, _self_]
models: {actor: {path: "hflow:addition"}}
batch: 2
steps: 1
workers: inproc
nodes: {actor_gen: {max_tokens: 4}}
"""


def test_a_killed_run_is_not_what_it_was_when_it_ended_before(
    hflow: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(RECIPE)
    Path("mine.yaml").write_text(YAML)
    hflow.prints("run", "mine.py")
    assert "done after 1 steps" in hflow.prints("report", "mine")
    Path("kill").write_text("")
    command = [sys.executable, "-m", "hflow", "run", "--resume", "mine", "steps=5"]
    assert forked_python.run(command, capture_output=True).returncode == -9
    assert "failed or killed after 1 of 5 steps" in hflow.prints("report", "mine")
    run = Path("runs/mine/latest")
    kept = read_trace(run / "trace.json")
    assert "score" in {span.name for span in kept.spans}, "the trace is whole after a kill"
    doing = read_activity(run / "activity.json")
    assert doing is not None
    assert [(work.name, work.step) for work in doing.work] == [("advantage", 2)]
    Path("kill").unlink()
    hflow.prints("run", "--resume", "mine", "steps=3")
    assert json.loads(Path("runs/mine/latest/summary.json").read_text())["steps"] == 3
    assert "done after 3 steps" in hflow.prints("report", "mine")
    assert not (run / "activity.json").exists()
    assert [path.name for path in sorted(run.resolve().glob("trace*"))] == [
        "trace-1.json",
        "trace-2.json",
        "trace.json",
    ]
