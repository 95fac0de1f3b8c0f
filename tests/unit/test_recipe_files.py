"""The files beside a recipe: which files other machines get, and what processes import from there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hflow.base import recipe_files
from hflow.base.errors import RunError
from hflow.base.recipe_files import files_to_send, local_directory, pack
from hflow.dsl import load_recipe

RECIPE = """
from hflow import Dataset, Model, Recipe, Text, nodes, use
from beside import NAME

recipe = Recipe(NAME, Dataset(prompt=Text), [use(nodes.actor_gen, Model("actor"))])
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A recipe's directory with everything that may lie there."""
    made = tmp_path / "mine"
    files = ["recipe.py", "beside.py", "parts/deep.py", "tokens.py", "data.jsonl", "key.txt"]
    left_out = [".env", ".git/config", "__pycache__/beside.pyc", "runs/a/plan.json", "venv/bin/python"]
    left_out += [
        "out/run/ledger.sqlite",
        "out/run/metrics.jsonl",
        "server.pem",
        "api_token.txt",
        "secrets.yaml",
    ]
    for name in (*files, *left_out, "venv/pyvenv.cfg", "big.bin"):
        file = made / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    (made / "big.bin").write_bytes(bytes(recipe_files.MAX_FILE_BYTES + 1))
    (made / "link.txt").symlink_to("/etc/passwd")
    return made


def test_runs_secrets_and_big_files_are_not_sent(directory: Path) -> None:
    sent = {str(file.relative_to(directory)) for file in files_to_send(directory)}
    assert sent == {"recipe.py", "beside.py", "parts/deep.py", "tokens.py", "data.jsonl", "key.txt"}


def test_another_machine_imports_from_its_copy(directory: Path, tmp_path: Path) -> None:
    (directory / "beside.py").write_text("from pathlib import Path\nHERE = Path(__file__).parent\n")
    (tmp_path / "packed").write_bytes(pack(directory))
    code = f"""
from pathlib import Path
from hflow.base.recipe_files import local_directory, unpack, use_directory
copy = unpack(Path({str(tmp_path / "packed")!r}).read_bytes(), {str(directory)!r})
use_directory(copy)
import beside
assert beside.HERE == copy == local_directory({str(directory)!r}) != Path({str(directory)!r})
assert (copy / "parts" / "deep.py").is_file() and not (copy / ".env").exists()
"""
    command, env = [sys.executable, "-c", code], {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert local_directory(str(directory)) == directory  # here


def test_a_directory_that_is_too_large_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_files, "MAX_FILES", 3)
    with pytest.raises(RunError, match="Move the recipe, with what it imports, to a directory of its own"):
        pack(directory)


def test_recipes_with_modules_of_the_same_name_get_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.py").write_text(RECIPE)
        (tmp_path / name / "beside.py").write_text(f"NAME = {name!r}\n")
    names = [load_recipe(tmp_path / name / "recipe.py").name for name in ("one", "two", "three", "one")]
    assert names == ["one", "two", "three", "one"]
