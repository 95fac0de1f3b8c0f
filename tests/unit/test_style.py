"""Ruff's rules, and what a reader would stumble over that ruff does not see."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "hflow").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").rglob("*.py"))
CONFIGS = sorted([*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "recipes").rglob("*.yaml")])
HARNESS = [ROOT / "Makefile", ROOT / ".ci" / "run", *sorted((ROOT / "requirements").glob("*.*"))]

NOTES_TO_SELF = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:work|root|home|tmp|opt)/")
INDEXES = re.compile(r"https?://|--(?:extra-)?index-url|--find-links")


def matches(paths: list[Path], pattern: re.Pattern[str]) -> list[str]:
    """Where a pattern occurs."""
    found = [(path, match) for path in paths for match in pattern.findall(path.read_text())]
    return [f"{path.relative_to(ROOT)}: {match}" for path, match in found]


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_ruff_finds_nothing(command: list[str]):
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run([ruff, *command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_notes_to_self_and_no_machine_paths():
    paths = [*SOURCES, *RECIPES, *CONFIGS, *HARNESS]
    assert matches(paths, NOTES_TO_SELF) == []
    assert matches(paths, MACHINE_PATHS) == []


def test_the_harness_names_no_index():
    assert matches(HARNESS, INDEXES) == []


def test_what_is_installed_is_called_hflow_rl():
    """Another project has the name hflow on the Python package index."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md")]
    asked = re.compile(r"pip install [^\n#`]*\bhflow\b(?!-rl)[^\n]*|\bhflow\\?\[[a-z][\w,-]*\\?\]")
    assert matches([*SOURCES, *RECIPES, *HARNESS, *pages], asked) == []


def test_files_say_what_they_are_for():
    sources = {path: path.read_text() for path in [*SOURCES, *RECIPES]}
    silent = [
        path for path, text in sources.items() if text.strip() and not ast.get_docstring(ast.parse(text))
    ]
    assert silent == []


def test_the_lock_pins_every_line():
    files = [ROOT / "requirements" / name for name in ("lock.txt", "without-deps.txt")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    packages = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in packages if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert len({line.partition("==")[0].lower() for line in packages}) == len(packages)


def test_ci_calls_make_test_and_nothing_else():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if not line.startswith(("#", "set ", "cd "))] == ["make test"]


def test_one_class_name_means_one_thing():
    classes: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in classes.items() if len(paths) > 1} == {}


CLAUSE = re.compile(r"Return (?:what|how|why|which|where|when|who)\b")
"""A docstring that describes a value by a clause instead of naming it."""
FRAGMENT = re.compile(r"^ {4,}\w+: (?:of|to|as|its|that|those|their|whose) .*", re.MULTILINE)
"""An item of `Args:` that cannot be read alone, as in "model: of the node."."""
ATTRIBUTE = re.compile(r"(?:Of|To|As|Its|That of|Those|Their|Whose) .*")


def documentation(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, text) of the docstrings of modules, classes, functions and attributes."""
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return [(text.lineno, text.value) for text in texts if isinstance(text.value, str)]


def test_docstrings_name_things_by_phrases_that_can_be_read_alone():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {wrong.strip()}"
        for path in SOURCES
        for line, text in documentation(ast.parse(path.read_text()))
        for wrong in [
            *(match[0] for match in (CLAUSE.match(text), ATTRIBUTE.match(text)) if match),
            *FRAGMENT.findall(text),
        ]
    ]
    assert found == []
