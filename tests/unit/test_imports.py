import configparser
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]

HEAVY = ("torch", "ray", "transformers", "tensorboardX", "tokenizers")

PROBE = f"""
import json, sys
from hflow.cli import app
for arguments in json.loads(sys.argv[1]):
    app(arguments, standalone_mode=False)
    heavy = [name for name in {HEAVY} if name in sys.modules]
    if heavy:
        sys.exit(f"{{arguments}} imported {{heavy}}")
"""
RECIPES = sorted(f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.py"))


@pytest.mark.parametrize(
    "commands",
    [
        [["check", "recipes/ppo.py"], ["check", "recipes/tool_agent.py"]],
        [["plan", recipe] for recipe in RECIPES[::3]],
        [["simulate", "recipes/grpo_async.py", "--steps", "8"]],
        [["run", "recipes/grpo.py", "--cfg"]],
    ],
    ids=["check", "plan", "simulate", "compose"],
)
def test_commands_without_a_device_import_nothing_heavy(commands: list[list[str]]):
    """Commands of a kind share a process, as what one of them imports is seen after all."""
    assert commands
    command = [sys.executable, "-c", PROBE, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_no_module_imports_itself_through_others():
    """Imports for type checkers, and those inside of functions, count too."""
    graph = grimp.build_graph("hflow")
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imported) > 100
    TopologicalSorter(imported).prepare()  # raises a CycleError that has the circle


def test_descriptors_import_nothing_heavy():
    code = f"""
import sys
from hflow.planner.plan.channels import CHANNELS
from hflow.planner.plan.optimizers import OPTIMIZERS
from hflow.planner.plan.traits import BACKENDS, ENGINES
registries = (BACKENDS, ENGINES, OPTIMIZERS, CHANNELS)
for registry, name in ((registry, name) for registry in registries for name in registry):
    registry.load(name)
    heavy = [name for name in {HEAVY} if name in sys.modules]
    assert not heavy, (name, heavy)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert process.returncode == 0, process.stderr


def test_workers_are_started_before_anything_heavy_is_imported():
    """What `hflow run` imports to plan a run and to start workers on Ray: these import torch meanwhile."""
    code = """
import sys
import hflow.launch.running.run_recipe
import hflow.workers.ray.ray_actors
heavy = [name for name in ("torch", "transformers", "tensorboardX") if name in sys.modules]
assert not heavy, heavy
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert process.returncode == 0, process.stderr


def test_packages_follow_the_import_rules():
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_is_in_the_import_table():
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    listed = {
        section["protected_modules"].strip()
        for section in contracts.values()
        if section.get("type") == "protected"
    }
    free = {f"hflow.{name}" for name in ("base", "metrics", "observer", "types")}
    free |= {f"hflow.{name}" for name in ("extend", "testing", "__init__", "__main__")}
    found = {
        f"hflow.{p.stem}"
        for p in (ROOT / "hflow").iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert found - free == listed
