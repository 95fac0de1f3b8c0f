import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEAVY = ("torch", "ray", "transformers", "tensorboardX", "tokenizers")

PROBE = f"""
import sys
from hflow.cli import app
app(sys.argv[1:], standalone_mode=False)
print("heavy:", [name for name in {HEAVY} if name in sys.modules])
"""


def heavy_after(*arguments: str) -> str:
    """The last line of a command's output: which heavy packages it has imported."""
    command = [sys.executable, "-c", PROBE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("recipe", sorted(path.name for path in (ROOT / "recipes").glob("*.py")))
@pytest.mark.parametrize("command", ["check", "plan"])
def test_checking_and_planning_import_nothing_heavy(command: str, recipe: str):
    assert heavy_after(command, f"recipes/{recipe}") == "heavy: []"


def test_simulating_imports_nothing_heavy():
    assert heavy_after("simulate", "recipes/grpo_async.py", "--steps", "8") == "heavy: []"


def test_composing_a_configuration_imports_nothing_heavy():
    assert heavy_after("run", "recipes/grpo.py", "--cfg") == "heavy: []"


def test_packages_import_whom_they_may():
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_is_in_the_import_table():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    listed = {name for c in contracts if c["type"] == "protected" for name in c["protected_modules"]}
    free = {"hflow.errors", "hflow.types", "hflow.lazy", "hflow.testing", "hflow.__init__", "hflow.__main__"}
    found = {
        f"hflow.{p.stem}"
        for p in (ROOT / "hflow").iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert found - free == listed
