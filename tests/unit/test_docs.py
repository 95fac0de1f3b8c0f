"""Examples in the documentation run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["agents", "metrics", "nodes", "rewards"])
def test_the_examples_of_a_page_run_one_after_the_other(name: str) -> None:
    path = DOCS / f"{name}.md"
    blocks = BLOCK.findall(path.read_text())
    assert blocks
    names: dict[str, object] = {"__name__": f"docs_{name}"}
    for block in blocks:
        exec(compile(block, str(path), "exec"), names)


PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "recipes" / "README.md"])
FILE = re.compile(r"`([\w./-]+/[\w./-]*)`")
"""A file or folder in backticks; a name without a slash may be anything."""
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


def exists(name: str) -> bool:
    """Whether a path in the documentation exists, in the repository or in the package."""
    return any((base / name).exists() for base in (ROOT, ROOT / "hflow", ROOT / "hflow" / "backends"))


@pytest.mark.parametrize("name", ["architecture", "contributing", "decisions"])
def test_the_files_that_a_page_names_exist(name: str) -> None:
    named = FILE.findall((DOCS / f"{name}.md").read_text())
    assert named
    paths = [path for path in named if path.endswith((".py", "/", ".toml", ".md")) and "NAME" not in path]
    assert [path for path in paths if not exists(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_architecture_stays_a_description() -> None:
    assert len((DOCS / "architecture.md").read_text().split()) <= 2000
