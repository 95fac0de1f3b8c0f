"""The command line: commands, options, exit codes and one-line errors."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from typer.main import get_command

from hflow import doctor
from hflow.cli import app
from hflow.config import load_config
from hflow.doctor import OptionalPart
from hflow.doctor.finding import Finding
from hflow.launch.planning import plan_file
from hflow.planner.models.descriptors import InstallProblem, engine_kind
from hflow.planner.plan.optimizers import OPTIMIZERS

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


def test_commands_and_options_do_not_change():
    commands = get_command(app).commands  # type: ignore[attr-defined]
    surface = {
        name: sorted(option for p in command.params for option in [*p.opts, *p.secondary_opts])
        for name, command in commands.items()
    }
    assert surface == {
        "check": ["overrides", "recipe"],
        "compare": ["--html", "--json", "--metric", "runs"],
        "eval": [
            "--json",
            "--live",
            "--model",
            "--pass-at",
            "--plain",
            "--recipe",
            "--samples",
            "--stream",
            "--temperature",
            "--threshold",
            "overrides",
            "target",
        ],
        "export": ["--dtype", "--model", "--push", "directory", "target"],
        "new": ["--chat", "directory", "recipe"],
        "nodes": ["--json", "name", "subject"],
        "plan": [
            "--diff",
            "--dot",
            "--explain",
            "--html",
            "--json",
            "--mermaid",
            "--what-if",
            "overrides",
            "recipe",
        ],
        "profile": ["--device", "--out"],
        "report": ["--html", "run"],
        "run": ["--cfg", "--live", "--plain", "--plan", "--resume", "overrides", "recipe"],
        "serve": ["--api-key", "--engine", "--host", "--model", "--port", "overrides", "target"],
        "simulate": ["--json", "--seed", "--steps", "overrides", "recipe"],
        "size": [
            "--cheapest",
            "--days",
            "--html",
            "--json",
            "--most",
            "--on",
            "--samples",
            "--seconds",
            "overrides",
            "recipe",
        ],
        "translate": ["--cluster", "--json", "directory", "file"],
        "twin": ["--as-configured", "--layout", "--steps", "overrides", "recipe"],
        "doctor": ["--gpus", "--json"],
        "samples": ["--count", "--csv", "--json", "--limit", "--text", "--where", "run"],
        "watch": ["--port", "run"],
        "why": ["--json", "run", "sample"],
    }


@pytest.mark.parametrize("command", get_command(app).commands)  # type: ignore[attr-defined]
def test_help_gives_examples(command: str, hflow: CommandLine):
    assert f"hflow {command}" in hflow.prints(command, "--help").partition("Examples:")[2]


def test_check_prints_the_graph(good: str, hflow: CommandLine):
    out = hflow.prints("check", good)
    assert out.startswith("recipe small: ")
    assert all(name in out for name in ("actor_gen", "score", "group_advantage", "actor_train"))


def test_nodes_lists_those_of_a_recipe(good: str, hflow: CommandLine):
    out = hflow.prints("nodes", good)
    assert all(name in out for name in ("actor_gen", "score", "group_advantage"))
    (clip,) = [
        knob
        for knob in json.loads(hflow.prints("nodes", good, "actor_train", "--json"))["knobs"]
        if knob["name"] == "clip"
    ]
    assert clip["default"] == 0.2


def test_nodes_lists_optimizers_and_adapters_with_their_options(hflow: CommandLine):
    out = hflow.prints("nodes")
    assert all(f"models.NAME.optim.name={name} " in out for name in OPTIMIZERS)
    assert "models.NAME.lora " in out
    muon = json.loads(hflow.prints("nodes", "muon", "--json"))
    assert [option["name"] for option in muon["options"]] == ["betas", "eps", "momentum", "nesterov"]
    assert muon in json.loads(hflow.prints("nodes", "--json"))
    assert "models.NAME.lora.OPTION" in hflow.prints("nodes", "lora")
    assert "did you mean 'muon'" in hflow.refused("nodes", "muom")


def test_plan_prints_a_page(good: str, hflow: CommandLine):
    out = hflow.prints("plan", good, "cluster=h100-1x4", "steps=7")
    assert "h100-1x4" in out
    assert "7 steps" in out


def test_a_plan_of_a_model_without_weights_says_how_to_name_them(good: str, hflow: CommandLine):
    said = " ".join(hflow.prints("plan", good, "cluster=cpu-1x1").split())
    assert "actor: it has no weights yet (set models.actor.path to a checkpoint directory, or " in said


def test_plan_json_prints_only_a_plan_file(good: str, hflow: CommandLine):
    document = json.loads(hflow.prints("plan", good, "--json", "cluster=cpu-1x2"))
    assert list(document) == ["format", "recipe", "config", "plan"]
    assert document["config"]["cluster"] == "cpu-1x2"
    plan = document["plan"]
    assert plan["recipe"] == "small"
    assert plan["cluster"]["name"] == "cpu-1x2"
    assert len(plan["digest"]) == 64


def test_plan_prints_dot_and_mermaid(good: str, hflow: CommandLine):
    assert hflow.prints("plan", good, "--dot").startswith('digraph "small" {\n')
    assert hflow.prints("plan", good, "--mermaid").startswith("flowchart LR\n")


def test_plan_html_writes_a_page(good: str, tmp_path: Path, hflow: CommandLine):
    out = hflow.prints("plan", good, "--html", tmp_path / "plan.html")
    assert out.startswith(f"{tmp_path}/plan.html")
    assert (tmp_path / "plan.html").read_text().lstrip().lower().startswith("<!doctype html>")
    assert (
        json.loads(hflow.prints("plan", good, "--html", str(tmp_path / "again.html"), "--json"))["format"]
        == plan_file.FORMAT
    )
    assert (tmp_path / "again.html").is_file()


@pytest.fixture
def lock(good: str, tmp_path: Path, hflow: CommandLine) -> str:
    """The plan file of the good recipe."""
    (tmp_path / "lock.json").write_text(hflow.prints("plan", good, "--json", "steps=7", "cluster=cpu-1x1"))
    return str(tmp_path / "lock.json")


def test_equal_plans_exit_with_0(good: str, lock: str, hflow: CommandLine):
    assert (
        "the same"
        in hflow.prints("plan", "--diff", lock, good, "steps=7", "cluster=cpu-1x1").splitlines()[-1]
    )


def test_different_plans_exit_with_1(good: str, lock: str, hflow: CommandLine):
    ended = hflow("plan", "--diff", lock, good, "steps=7", "cluster=cpu-1x2")
    lines = ended.output.splitlines()
    assert ended.code == 1
    assert max(map(len, lines)) <= 100
    assert "reshard actor@train d1 -> d2" in lines[-1]
    ended = hflow("plan", "--json", "--diff", lock, good, "steps=8", "cluster=cpu-1x1")
    assert ended.code == 1
    assert json.loads(ended.output)["changes"][0] == {
        "topic": "schedule",
        "subject": "steps",
        "before": "7",
        "after": "8",
        "effect": "same",
    }


def test_a_plan_that_no_longer_fits_is_a_one_line_error(lock: str, hflow: CommandLine):
    error = hflow.refused("run", "--plan", lock, "steps=8")
    assert f"{lock} is out of date: schedule steps: 7 -> 8, and 2 more" in error


def test_cfg_prints_the_configuration_of_a_plan_file(good: str, lock: str, hflow: CommandLine):
    assert "out: elsewhere\n" in hflow.prints("run", "--plan", lock, "--cfg", "out=elsewhere")
    assert "steps: 7\n" in hflow.prints("run", "--plan", lock, good, "--cfg")


BIG = ("model@models.actor=qwen2.5-7b", "models.actor.path=null", "models.actor.backend=megatron", "batch=64")
LONG = ("workload.prompt=256", "workload.response_mean=512", "nodes.actor_gen.max_tokens=1024")

REFUSALS = {
    "plan": "name a recipe",
    "run": "name a recipe",
    "run steps=3": "name a recipe",
    "check steps=3": "name a recipe before steps=3",
    "check grpoo": "there is no shipped recipe 'grpoo', and a recipe's file ends in .py; did you",
    "check recipes/gone/grpo.py": "did you mean 'grpo', which comes with hflow?",
    "check DIR/none.py": "there is no recipe file 'DIR/none.py'",
    "plan DIR/none.py": "there is no recipe file 'DIR/none.py'",
    "run DIR/none.py": "there is no recipe file 'DIR/none.py'",
    "plan GOOD stps=1": "unknown key 'stps'; did you mean 'steps'",
    "run GOOD stps=1": "unknown key 'stps'; did you mean 'steps'",
    "plan GOOD nodes.actor_train.clp=1": "'nodes.actor_train.clp'; did you mean 'nodes.actor_train.clip'",
    "plan GOOD cluster=h100": "cluster 'h100'",
    "plan GOOD --json --dot": "--json and --dot exclude each other",
    "plan GOOD --dot --mermaid": "--dot and --mermaid exclude each other",
    "plan GOOD --html none/x.html": "--html: cannot write none/x.html: No such",
    "plan --diff a b GOOD": "--diff compares two plans, a and b",
    "plan --diff a b --dot": "remove --dot",
    "plan --diff a b --html c": "remove --html",
    "plan --diff a b steps=3": "steps=3 has no effect",
    "plan --diff a GOOD": "cannot read the plan file 'a': No such file",
    "plan --diff DIR GOOD": "DIR is not a run's directory",
    "plan --diff GOOD none.py": "there is no recipe file 'none.py'",
    "plan GOOD --what-if": "--what-if needs a change, such as schedule.max_staleness=4",
    "plan GOOD --what-if faster": "--what-if 'faster' is not KEY=VALUE",
    "plan GOOD --what-if schedul.queue=4": "unknown key 'schedul'; did you mean 'schedule'?",
    "plan GOOD --what-if batch='4": "No closing quotation; close the quotation",
    "plan GOOD --what-if batch=4 --dot": "--what-if prints text or --json; remove --dot",
    "plan GOOD --what-if batch=4 --diff a b": "--diff and --what-if exclude each other",
    "run --plan GOOD": "GOOD is not a plan file",
    "run --plan none.json steps=3": "cannot read the plan file 'none.json': No such",
    "run grpo --resume earlier steps=3": "continues earlier with the recipe that it has; remove the recipe",
    "run a/b.py --resume earlier steps=3": "with the recipe that it has; remove the recipe a/b.py",
    "nodes actor_train score": "actor_train is not a recipe",
    "simulate GOOD": "the size of actor is unknown",
    "size LARGE": "set exactly one of --seconds, --samples and --days",
    "size LARGE --seconds 3 --days 1": "set exactly one of --seconds, --samples and --days",
    "size LARGE --seconds -3": "set exactly one of --seconds, --samples and --days to a number above 0",
    "size LARGE --on h101 --days 1": "cluster 'h101' is not understood",
    "size LARGE --on h101-1x8 --days 1": "unknown device 'h101'; did you mean 'h100'?",
}
"""What is wrong with a command. GOOD is a recipe, LARGE one with a large model, and DIR a directory."""


@pytest.mark.parametrize("command", REFUSALS)
def test_a_mistake_is_one_line_and_exit_code_2(command: str, good: str, tmp_path: Path, hflow: CommandLine):
    large = " ".join(("recipes/grpo.py", *BIG, *LONG))

    def real(text: str) -> str:
        return text.replace("GOOD", good).replace("LARGE", large).replace("DIR", str(tmp_path))

    assert real(REFUSALS[command]) in hflow.refused(*real(command).split())


def test_simulate_prints_figures_of_the_run(monkeypatch, hflow: CommandLine):
    asked = ("simulate", "recipes/grpo_async.py", "--steps", "8", "--seed", "3")
    monkeypatch.chdir(Path(__file__).parents[2])
    found = json.loads(hflow.prints(*asked, "--json"))
    assert (found["recipe"], found["steps"], found["seed"]) == ("grpo_async", 8, 3)
    lines = hflow.prints(*asked).splitlines()
    assert max(map(len, lines)) <= 100
    assert any("8 of 8 steps, seed 3" in line for line in lines)


def test_cfg_prints_a_configuration_that_loads_to_the_same_values(good: str, hflow: CommandLine):
    Path(good).with_suffix(".yaml").write_text(
        hflow.prints("run", good, "--cfg", "steps=3", "models.actor.optim.lr=2e-4")
    )
    config = load_config(good)
    assert (config.steps, config.models["actor"].optim.lr) == (3, 2e-4)
    assert not (Path(good).parent / "runs").exists()


def test_a_bug_is_not_hidden(good: str, monkeypatch, hflow: CommandLine):
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("hflow.launch.check", broken)
    with pytest.raises(ZeroDivisionError):
        hflow("check", good)


def test_control_c_prints_one_line_and_exits_130(tmp_path: Path):
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "hflow", "check", str(tmp_path / "slow.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "error: interrupted\n"


def test_a_command_without_a_reader_ends_quietly():
    command = subprocess.list2cmdline([sys.executable, "-m", "hflow", "nodes", "--json"])
    for redirect, code in ((">&-", 0), (">&- <&- 2>&-", 0), ("| true", 1)):
        line = f"set -o pipefail; {command} {redirect}"
        ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
        assert (ended.returncode in (0, code), ended.stderr) == (True, "")


@pytest.mark.ray
def test_doctor_accepts_this_environment(no_ray, hflow: CommandLine):
    rows = [line.split() for line in hflow.prints("doctor").splitlines()]
    fit = {(row[0], row[1]) for row in rows if row[2:3] == ["ok"]}
    assert fit >= {("version", "torch"), ("backend", "torch"), ("engine", "embedded"), ("ray", "start")}


def test_doctor_gives_the_command_that_fixes(monkeypatch):
    embedded = engine_kind("embedded")
    fast = replace(embedded, name="fast", packages=("an_absent_package",), install="pip install fast")
    monkeypatch.setattr(doctor, "ENGINES", ("fast",))
    monkeypatch.setattr(doctor, "engine_kind", {"fast": fast}.__getitem__)
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "an-absent-package"))
    found = {finding.name: finding for finding in doctor.check_machine(start_ray=False)}
    detail = "generation without further packages: an_absent_package is not installed"
    assert (found["fast"].detail, found["fast"].fix) == (detail, "pip install fast")
    assert found["an-absent-package"].fix == "make env"
    assert {name for name, finding in found.items() if finding.ok} >= {"python", "torch", "cpu"}


def test_doctor_says_whether_vllm_fits_torch(monkeypatch):
    """On a machine without vLLM, with one that fits torch, and with one that does not."""

    def vllm(problem: InstallProblem | None = None, packages: tuple[str, ...] = ("torch",)) -> Finding:
        kind = replace(
            engine_kind("vllm"), factory=print, packages=packages, find_conflict=lambda device: problem
        )
        monkeypatch.setattr(doctor, "ENGINES", ("vllm",))
        monkeypatch.setattr(doctor, "engine_kind", {"vllm": kind}.__getitem__)
        return next(f for f in doctor.check_machine(start_ray=False) if f.name == "vllm")

    absent = vllm(packages=("an_absent_package",))
    assert not absent.ok
    assert not absent.required
    assert absent.detail == "fast generation, by default on GPUs: an_absent_package is not installed"
    assert absent.fix == "pip install 'hflow-rl[vllm]'"
    conflict = vllm(InstallProblem("vllm 0.32.0 needs torch==2.13.0, but torch 2.11.0 is installed", "pip"))
    assert (conflict.ok, conflict.fix) == (False, "pip")
    assert conflict.detail.endswith("vllm 0.32.0 needs torch==2.13.0, but torch 2.11.0 is installed")
    assert vllm().detail == f"fast generation, by default on GPUs: torch {metadata.version('torch')}"


def test_doctor_names_optional_parts(monkeypatch):
    parts = (
        OptionalPart("here", "one thing", ("typer",)),
        OptionalPart("gone", "another", ("typer", "an_absent_package")),
    )
    monkeypatch.setattr(doctor, "OPTIONAL_PARTS", parts)
    found = {f.name: f for f in doctor.check_machine(start_ray=False) if f.topic == "optional"}
    assert (found["here"].ok, found["here"].detail.partition(" ")[0]) == (True, "one")
    assert found["gone"] == Finding(
        "optional",
        "gone",
        False,
        "another: an_absent_package not installed",
        "pip install 'hflow-rl[gone]'",
        False,
    )


def test_doctor_warns_of_the_other_project_of_this_name(tmp_path, monkeypatch):
    assert not [f for f in doctor.check_machine(start_ray=False) if f.name == "hflow"]
    installed = tmp_path / "hflow-0.3.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: hflow\nVersion: 0.3.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = (f for f in doctor.check_machine(start_ray=False) if f.name == "hflow")
    assert (found.ok, found.required) == (False, False)
    assert "hflow 0.3.0 is installed, which is another project" in found.detail
    assert "pip uninstall hflow" in found.fix


def test_every_optional_part_is_an_extra():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(tomllib.loads(text)["project"]["optional-dependencies"])
    assert {part.extra for part in doctor.OPTIONAL_PARTS} <= extras
    assert {"vllm", "megatron"} <= extras


def test_doctor_names_hflows_own_parts():
    found = {(f.topic, f.name): f for f in doctor.check_machine(start_ray=False)}
    assert found["backend", "torch"].ok
    assert found["engine", "embedded"].ok
    assert all(finding.fix for finding in found.values() if not finding.ok)


# ---------------------------------------------------------------------------- plan --what-if
def test_what_if_prints_each_change_beside_the_base(hflow: CommandLine):
    small = ("cluster=h100-1x8", "schedule.max_concurrent=512", *BIG)
    tokens = "models.actor.tokens_per_microbatch"
    both = f"models.actor.layout=d2t2p2 {tokens}=4096"
    changes = ("schedule.max_concurrent=16", "models.actor.layout=d1t2p4", both)
    found = json.loads(hflow.prints("plan", "recipes/grpo.py", *small, "--what-if", *changes, "--json"))
    base = found["base"]
    assert (base["cluster"], base["num_devices"]) == ("h100-1x8", 8)
    hours = base["seconds_per_step"] / 3600
    assert base["dollars_per_step"] == pytest.approx(base["dollars_per_hour"] * hours)
    assert base["dollars"] == pytest.approx(280 * base["dollars_per_step"])
    slower, smaller, given = found["changes"]
    assert [row["change"] for row in found["changes"]] == list(changes)
    assert slower["speed_up"] < 1  # fewer samples in flight
    expected = base["seconds_per_step"] / slower["figures"]["seconds_per_step"]
    assert slower["speed_up"] == pytest.approx(expected)
    assert smaller["figures"]["peak_bytes"] < base["peak_bytes"]
    assert "actor@train" in {change["subject"] for change in smaller["diff"]["changes"]}
    assert tokens in {change["subject"] for change in given["diff"]["changes"]}
    assert (smaller["decided_keys"], given["decided_keys"]) == ([tokens], [])

    out = hflow.prints("plan", "recipes/grpo.py", *small, "--what-if", changes[0])
    assert "as configured" in out
    assert changes[0] in out


def test_what_if_names_a_change_that_has_no_plan_and_goes_on(hflow: CommandLine):
    changes = ("cluster=h100-1x1", "network=ib-xdr")
    base = ("cluster=h100-2x8", "models.actor.layout=d2t4p2")
    options = ("recipes/grpo.py", *BIG, *base, "workload.prompt=1024", "workload.response_mean=1024")
    options = (*options, "nodes.actor_gen.max_tokens=1024", "--what-if", *changes)
    out = " ".join(hflow.prints("plan", *options).split())
    assert "no plan" in out
    assert f"{changes[0]}: " in out
    assert "needs" in out.partition(f"{changes[0]}: ")[2]


def test_what_if_shows_no_memory_of_a_model_whose_sizes_are_unknown(tmp_path, hflow: CommandLine):
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    changes = ("batch=64", "calibration=nosuch.yaml")
    options = ("recipes/grpo.py", "cluster=h100-2x8", f"models.actor.path={tmp_path}", "--what-if", *changes)
    shown = json.loads(hflow.prints("plan", *options, "--json"))
    assert shown["base"]["peak_bytes"] is None
    assert shown["changes"][0]["figures"]["peak_bytes"] is None
    assert shown["changes"][1]["refusal"].startswith("cannot read 'nosuch.yaml'")


# ---------------------------------------------------------------------------- size
def sized(hflow: CommandLine, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code of `hflow size` for GRPO of a 7B model, and what it prints as JSON."""
    settings = (*BIG, *LONG, "schedule.max_concurrent=512")
    ended = hflow("size", "recipes/grpo.py", *settings, "--json", *options)
    return ended.code, json.loads(ended.output)


@pytest.mark.long
def test_size_chooses_the_smallest_or_the_cheapest_cluster(hflow: CommandLine):
    on = ("--on", "h100-1x8", "--on", "h100-2x8", "--on", "h200-2x8")
    code, found = sized(hflow, *on, "--seconds", "1000")
    assert code == 0
    rows = {row["cluster"]: row["figures"] for row in found["clusters"]}
    assert found["chosen"] == "h100-1x8"
    just_missed = rows["h100-1x8"]["samples_per_second"] * 1.001
    assert rows["h100-2x8"]["samples_per_second"] > just_missed
    code, found = sized(hflow, *on, "--samples", str(just_missed))
    fitting = {name: rows[name]["dollars"] for name in ("h100-2x8", "h200-2x8")}
    assert found["chosen"] == min(fitting, key=fitting.__getitem__)  # of equal size, the cheaper one

    code, found = sized(hflow, *on, "--days", "1000", "--cheapest")
    assert found["chosen"] == min(rows, key=lambda name: rows[name]["dollars"])
    for figures in rows.values():
        assert figures["days"] == pytest.approx(280 * figures["seconds_per_step"] / 86400)
        assert figures["dollars"] == pytest.approx(24 * figures["days"] * figures["dollars_per_hour"])


@pytest.mark.long
def test_a_device_stands_for_clusters_that_double(hflow: CommandLine):
    code, found = sized(hflow, "--on", "h100", "--most", "16", "--seconds", "1e-3")
    assert code == 2
    assert [row["cluster"] for row in found["clusters"]] == [
        "h100-1x1",
        "h100-1x2",
        "h100-1x4",
        "h100-1x8",
        "h100-2x8",
    ]
    assert found["clusters"][0]["refusal"].startswith("actor")
    assert found["chosen"] is None
    assert "no cluster reaches 0.001 s a step; the fastest, h100-2x8, reaches" in found["problem"]
    minutes = found["clusters"][-1]["figures"]["days"] * 24 * 60
    assert 10 < minutes < 99.5
    assert f" {minutes:.3g} min for the whole run. Allow larger clusters" in found["problem"]


def test_size_writes_the_page_of_the_chosen_plan(tmp_path: Path, hflow: CommandLine):
    page = tmp_path / "page.html"
    options = ("--on", "h100-1x8", "--on", "h100-2x8", "--seconds", "1000", "--html", str(page))
    sized(hflow, *options)
    text = page.read_text()
    assert '<section id="sizes"' in text
    assert "h100-1x8 is the smallest of these that reaches 1000 s a step" in text
    assert text.index('id="sizes"') < text.index('<section id="graph"')


def test_a_size_that_has_no_plan_is_refused_below_the_table(hflow: CommandLine):
    error = hflow.fails("size", "recipes/grpo.py", *BIG, *LONG, "--on", "h100-1x1", "--days", "1")
    assert "the recipe has no plan on any of 1 clusters; on the last" in error


def test_a_device_without_a_price_is_refused_where_cost_decides(tmp_path: Path, hflow: CommandLine):
    figures = Path("configs/hardware/devices/h100.yaml").read_text().splitlines()
    (tmp_path / "hardware" / "devices").mkdir(parents=True)
    unpriced = [line for line in figures if not line.startswith("dollars_per_hour")]
    (tmp_path / "hardware" / "devices" / "mine.yaml").write_text("\n".join(unpriced))
    recipe = tmp_path / "grpo.py"
    recipe.write_text(Path("recipes/grpo.py").read_text())
    (tmp_path / "grpo.yaml").write_text(Path("recipes/grpo.yaml").read_text())
    options = ("--on", "mine-1x8", "--seconds", "1000", "--cheapest")
    assert "mine has no price; set dollars_per_hour in hardware/devices/mine.yaml" in hflow.refused(
        "size", str(recipe), *BIG, *options
    )
