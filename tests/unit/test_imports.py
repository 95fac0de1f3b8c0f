import configparser
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]

HEAVY = ("torch", "ray", "transformers", "tensorboardX", "tokenizers")
# Planning smollm2 converts its package once, with torch.
PLANNED = sorted(
    f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.py") if path.stem != "smollm2"
)[::5]


def commands(*lines: str) -> str:
    """Return a program that runs commands in one process: what one of them imports is seen after all."""
    calls = (f"app({line.split()!r}, standalone_mode=False)" for line in lines)
    return "\n".join(("from hflow.cli import app", *calls))


READ_ALL = """
from pathlib import Path
from hflow.dsl import load_recipe
from hflow.graph.build import build_graph
for folder in ("tests/graphs/good", "tests/graphs/warned", "recipes"):
    for path in Path(folder).glob("*.py"):
        build_graph(load_recipe(path).spec())
"""
LOAD_ALL = """
from hflow.planner.plan.channels import CHANNELS
from hflow.planner.plan.optimizers import OPTIMIZERS
from hflow.planner.plan.traits import BACKENDS, ENGINES
from hflow.types.recorded import RECORDED_KINDS
for registry in (BACKENDS, ENGINES, OPTIMIZERS, CHANNELS, RECORDED_KINDS):
    assert [registry.load(name) for name in registry]
"""
# What none of these commands needs.
UNNEEDED = (*HEAVY, "networkx", "jinja2", "hflow.runtime", "hflow.workers")
UNPLANNED = (*UNNEEDED, "numpy", "hflow.planner.search", "hflow.planner.forecast")
ABSENT = {
    "help": (
        commands("--help"),
        (*UNNEEDED, "numpy", "asyncio", "hydra", "pydantic", "hflow.config", "hflow.planner", "hflow.report"),
    ),
    "check": (commands("check recipes/ppo.py"), (*UNPLANNED, "asyncio")),
    "nodes": (commands("nodes"), UNPLANNED),
    "plan": (commands("plan recipes/ppo.py"), (*UNNEEDED, "asyncio")),
    "hflow": ("import hflow", (*HEAVY, "hydra", "hflow.launch", "hflow.planner")),
    "function check": ("import hflow; hflow.check('recipes/sft.py')", ("torch", "ray")),
    "algo and nodes": ("from hflow import algo, nodes", ("torch",)),
    "reading recipes": (READ_ALL, ("torch", "ray", "transformers", "hydra")),
    "descriptors": (LOAD_ALL, (*HEAVY, "hydra")),
    "commands": (
        commands(
            *("check recipes/ppo.py", "check recipes/tool_agent.py", "run recipes/grpo.py --cfg"),
            *(f"plan {recipe}" for recipe in PLANNED),
            "simulate recipes/grpo_async.py --steps 8",
        ),
        HEAVY,
    ),
    # What `hflow run` imports to plan a run and to start workers on Ray: these import torch meanwhile.
    "starting workers": (
        "import hflow.launch.running.run_recipe, hflow.workers.ray.ray_actors",
        ("torch", "transformers", "tensorboardX"),
    ),
    "child processes": (
        "import hflow.workers.bodies.pool_child, hflow.sandboxes.process.child",
        ("torch", "ray"),
    ),
}
"""What a process does, and the modules that it must not have imported then."""


@pytest.mark.parametrize("name", ABSENT)
def test_nothing_heavy_is_imported(name: str):
    program, absent = ABSENT[name]
    shown = f"{program}\nimport sys\nsys.exit([name for name in {absent} if name in sys.modules] or None)"
    done = subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_module_imports_itself_through_others():
    """Imports for type checkers, and those inside of functions, count too."""
    graph = grimp.build_graph("hflow")
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imported) > 100
    TopologicalSorter(imported).prepare()  # raises a CycleError that has the circle


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
    free = {f"hflow.{name}" for name in ("base", "metrics", "observer", "shapes", "types")}
    free |= {f"hflow.{name}" for name in ("extend", "testing", "__init__", "__main__")}
    found = {
        f"hflow.{p.stem}"
        for p in (ROOT / "hflow").iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert found - free == listed
