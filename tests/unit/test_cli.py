import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from hflow import doctor
from hflow.cli import app, main
from hflow.config import load_config
from hflow.doctor import Part

GOOD = '''"""GRPO, as small as it gets."""

from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, compute, generate, nodes, use

train = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@generate(actor, group=4)
async def actor_gen(engine: Engine, prompt: str) -> Trajectory:
    return await engine.complete(prompt)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


recipe = Recipe("small", train, [actor_gen, score, nodes.group_advantage, use(nodes.actor_train, actor)])
'''

SLOW = '''"""A recipe that takes its time."""

import time

print("reading", flush=True)
time.sleep(120)
'''


@pytest.fixture
def good(tmp_path: Path) -> str:
    (tmp_path / "small.py").write_text(GOOD)
    return str(tmp_path / "small.py")


def hflow(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["hflow", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_the_surface_is_frozen():
    commands = get_command(app).commands  # type: ignore[attr-defined]
    surface = {
        name: sorted(option for p in command.params for option in [*p.opts, *p.secondary_opts])
        for name, command in commands.items()
    }
    assert surface == {
        "check": ["overrides", "recipe"],
        "plan": ["--json", "overrides", "recipe"],
        "run": ["--cfg", "--live", "--plain", "overrides", "recipe"],
        "doctor": [],
    }


@pytest.mark.parametrize("command", ["check", "plan", "run", "doctor"])
def test_help_gives_examples(command: str, monkeypatch, capsys):
    assert hflow(monkeypatch, command, "--help") == 0
    assert f"hflow {command}" in capsys.readouterr().out.partition("Examples:")[2]


def test_check_prints_the_graph(good: str, monkeypatch, capsys):
    assert hflow(monkeypatch, "check", good) == 0
    out = capsys.readouterr().out
    assert out.startswith("recipe small: ")
    assert all(name in out for name in ("actor_gen", "score", "group_advantage", "actor_train"))


def test_plan_prints_a_page(good: str, monkeypatch, capsys):
    assert hflow(monkeypatch, "plan", good, "cluster=h100-1x4", "steps=7") == 0
    out = capsys.readouterr().out
    assert "h100-1x4" in out
    assert "7 steps" in out


def test_plan_as_json_is_json_and_nothing_else(good: str, monkeypatch, capsys):
    assert hflow(monkeypatch, "plan", good, "--json", "cluster=cpu-1x2") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["recipe"] == "small"
    assert plan["cluster"]["name"] == "cpu-1x2"
    assert len(plan["digest"]) == 64


def test_cfg_prints_what_composes_to_itself(good: str, monkeypatch, capsys):
    assert hflow(monkeypatch, "run", good, "--cfg", "steps=3", "models.actor.optim.lr=2e-4") == 0
    Path(good).with_suffix(".yaml").write_text(capsys.readouterr().out)
    config = load_config(good)
    assert (config.steps, config.models["actor"].optim.lr) == (3, 2e-4)
    assert not (Path(good).parent / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["steps=many"], "error: steps is 'many'; it must be a whole number"),
        (["stps=1"], "error: unknown key 'stps'; did you mean 'steps'?"),
        (["models.actr.dtype=bf16"], "error: unknown key 'models.actr'; did you mean 'actor'?"),
        (["nodes.scroe.timeout=1"], "error: unknown key 'nodes.scroe'; did you mean 'score'?"),
        (["nodes.actor_train.clp=0.1"], "error: unknown key 'nodes.actor_train.clp'; did you mean 'clip'?"),
        (["cluster=h100"], "error: cluster 'h100' is not understood"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_users_mistake_is_one_line_and_exit_code_2(
    command: str, arguments: list[str], message: str, good: str, monkeypatch, capsys
):
    assert hflow(monkeypatch, command, good, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("command", ["check", "plan", "run"])
def test_a_recipe_that_is_not_there(command: str, tmp_path: Path, monkeypatch, capsys):
    assert hflow(monkeypatch, command, str(tmp_path / "nothing.py")) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "nothing.py" in captured.err
    assert captured.err.count("\n") == 1


def test_a_bug_is_not_hidden(good: str, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("hflow.launch.check", broken)
    monkeypatch.setattr(sys, "argv", ["hflow", "check", good])
    with pytest.raises(ZeroDivisionError):
        main()


def test_control_c_is_one_line_and_130(tmp_path: Path):
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "hflow", "check", str(tmp_path / "slow.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "error: interrupted\n"


@pytest.mark.ray
def test_doctor_finds_this_environment_fit(monkeypatch, capsys):
    assert hflow(monkeypatch, "doctor") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    fit = {(row[0], row[1]) for row in rows if row[2:3] == ["ok"]}
    assert fit >= {("version", "torch"), ("backend", "torch"), ("engine", "embedded"), ("ray", "start")}


def test_doctor_gives_the_command_that_mends(monkeypatch):
    lacking = Part("engine", "fast", "hflow.errors", ("an_absent_package",), "pip install fast", False)
    future = Part("engine", "future", "hflow.an_absent_module", (), "pip install future", False)
    monkeypatch.setattr(doctor, "PARTS", (lacking, future))
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "an-absent-package"))
    found = {finding.name: finding for finding in doctor.examine(start_ray=False)}
    assert (found["fast"].detail, found["fast"].remedy) == ("needs an_absent_package", "pip install fast")
    assert found["future"].detail == "not part of this version"
    assert found["an-absent-package"].remedy == "make env"
    assert {name for name, finding in found.items() if finding.ok} >= {"python", "torch", "cpu"}


def test_doctor_names_hflows_own_parts():
    found = {(f.topic, f.name): f for f in doctor.examine(start_ray=False)}
    assert found["backend", "torch"].ok
    assert found["engine", "embedded"].ok
    assert all(finding.remedy for finding in found.values() if not finding.ok)
