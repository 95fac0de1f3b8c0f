"""Examples in the documentation run as they are written."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hflow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FLAGS = re.DOTALL | re.MULTILINE
BLOCK = re.compile(r"^```python\n(.*?)^```", FLAGS)


@pytest.mark.parametrize("name", ["agents", "metrics", "nodes", "rewards"])
def test_the_examples_of_a_page_run_one_after_the_other(name: str) -> None:
    path = DOCS / f"{name}.md"
    blocks = BLOCK.findall(path.read_text())
    assert blocks
    names: dict[str, object] = {"__name__": f"docs_{name}"}
    for block in blocks:
        exec(compile(block, str(path), "exec"), names)


FOLDERS = ("", "recipes", "recipes/gsm8k", "recipes/geometry3k", "benchmarks")
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / folder / "README.md" for folder in FOLDERS)])
FILE = re.compile(r"`([\w./-]+/[\w./-]*)`")
"""A file or folder in backticks; a name without a slash may be anything."""
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


def exists(name: str) -> bool:
    """Whether a path in the documentation exists, in the repository or in the package."""
    return any((base / name).exists() for base in (ROOT, ROOT / "hflow"))


@pytest.mark.parametrize("name", ["architecture", "contributing", "decisions"])
def test_the_files_that_a_page_names_exist(name: str) -> None:
    named = FILE.findall((DOCS / f"{name}.md").read_text())
    assert named
    paths = [path for path in named if path.endswith((".py", "/", ".toml", ".md")) and "NAME" not in path]
    assert [path for path in paths if not exists(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


DEFINED_IN = re.compile(r"`([\w.]+)`\s+\(`([\w/]+\.py)`\)")
"""A function, class or field in backticks, and the file that defines it."""


def test_the_names_of_the_walks_are_defined_in_their_files() -> None:
    named = DEFINED_IN.findall((DOCS / "architecture.md").read_text())
    assert len(named) > 60
    files = {file: (ROOT / "hflow" / file).read_text() for _, file in named}
    assert [
        (name, file)
        for name, file in named
        for part in name.split(".")
        if not re.search(rf"^\s*(?:(?:async )?def|class) {part}\b|^\s*{part}:", files[file], re.MULTILINE)
    ] == []


def test_the_architecture_stays_a_description() -> None:
    assert len((DOCS / "architecture.md").read_text().split()) <= 2800


@pytest.mark.parametrize("name", ["areal", "openrlhf", "trl", "verl"])
def test_the_example_of_another_library_can_be_planned(name: str, tmp_path: Path) -> None:
    folder = DOCS / "coming-from"
    text = (folder / f"{name}.md").read_text()
    recipes = [block for block in BLOCK.findall(text) if "Recipe(" in block]
    recipe = recipes[0] if recipes else BLOCK.findall((folder / "README.md").read_text())[0]
    (tmp_path / "example.py").write_text(recipe)
    (tmp_path / "example.yaml").write_text(re.findall(r"^```yaml\n(defaults:.*?)^```", text, FLAGS)[0])
    assert hflow.plan(tmp_path / "example.py").unrunnable == ()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. A warning is an error: a dead link or anchor, a page that is in no menu."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True
    )
    assert built.returncode == 0, built.stderr.decode()
    return folder


@pytest.mark.long
def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    pages = list(site.rglob("*.html"))
    assert pages
    assert {tag for page in pages for tag in loads.findall(page.read_text())} == set()


def exported_names(part: str) -> list[str]:
    """Return `__all__` of a part of hflow without importing it, as `hflow.algo` needs torch."""
    for node in ast.parse((ROOT / "hflow" / part / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise AssertionError(f"hflow.{part} has no __all__")


@pytest.mark.long
def test_the_reference_has_every_public_name(site: Path) -> None:
    text = "".join(page.read_text() for page in (site / "docs" / "reference").glob("*.html"))
    names = {f"hflow.{part}.{name}" for part in ("algo", "nodes", "rewards") for name in exported_names(part)}
    names |= {f"hflow.{name}" for name in hflow.__all__ if name not in ("algo", "nodes", "rewards")}
    names |= {"hflow.testing.ScriptedEngine", "hflow.testing.CharacterTokenizer"}
    assert {name for name in names if f'id="{name}"' not in text} == set()
    assert all(
        f"<code>{key}</code>" in text for key in ("max_staleness", "weight_decay", "cache_gib", "--json")
    )


def test_the_tables_of_the_reference_are_up_to_date() -> None:
    command = [sys.executable, "docs/site/repository.py", "--check"]
    found = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
