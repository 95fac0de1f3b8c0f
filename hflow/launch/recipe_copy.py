"""`hflow new`: a shipped recipe as files of one's own, with a test."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError
from hflow.base.hub import DATASET_PREFIX
from hflow.base.shipped import find_recipe, is_recipe_file, shipped_directory, shipped_recipes
from hflow.config.yaml_files import read_yaml
from hflow.launch.planning.read_recipe import read_recipe

CHAT = "_chat"
"""Ending of the name of the recipe that is the chat form of another."""
_NAMED = re.compile(r"recipes/((?:\w+/)*\w+)(\.\w+)")
"""A file of the directory of shipped recipes in a text."""

_TEST = '''"""Tests of {stem}.py: `pytest` runs them in seconds, without a GPU."""

import math
from pathlib import Path

{imports}
RECIPE = Path(__file__).with_name("{stem}.py")


def test_the_graph_has_no_mistakes() -> None:
    graph = hflow.check(RECIPE)
    assert any(node.spec.verb == "train" for node in graph.nodes)
{bodies}'''
_SCORE_TEST = """

def test_only_a_right_answer_gets_the_reward() -> None:
    assert score("042", "042") == 1
    assert score("999", "042") == 0
"""
_RUN_TEST = """

def test_two_steps_of_training(tmp_path: Path) -> None:
    summary = try_recipe(RECIPE, tmp_path)
    assert (summary.reason, summary.steps) == ("done", 2)
    assert all(math.isfinite(value) for value in summary.values.values())
"""


@dataclass(frozen=True)
class NewRecipe:
    """The files that `new_recipe` wrote."""

    recipe: Path
    files: tuple[Path, ...]
    """All files, the recipe first and its test last."""


def new_recipe(name: str, directory: Path, *, chat: bool = False) -> NewRecipe:
    """Write a shipped recipe, or its chat form, all files that it needs and a test to a directory.

    Raises:
        RecipeError: if there is no shipped recipe of this name.
        ConfigError: if the recipe has no chat form, or one of the files exists. Nothing is written then.
    """
    if is_recipe_file(name):
        raise ConfigError(f"{name} is a file; name a shipped recipe, such as grpo")
    source = _chat_form(name) if chat else find_recipe(name)
    sources = recipe_files(source)
    base = source.parent
    texts = {
        file.relative_to(base): _local_names(file.read_text(encoding="utf-8"), sources) for file in sources
    }
    test = Path(f"test_{source.stem}.py")
    texts.setdefault(test, _test_text(source))
    files = {directory / file: text for file, text in texts.items()}
    for file in files:
        if file.exists():
            raise ConfigError(f"{file} exists already and is not overwritten; name another directory")
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return NewRecipe(directory / source.name, tuple(files))


def recipe_files(recipe: Path) -> list[Path]:
    """Return the files of a shipped recipe: itself, its YAML files, and what is beside it and it needs.

    Needed are the files and groups in defaults lists, modules that a file imports, and other files that the
    text of one names, such as `sums.txt`, unless they belong to another recipe. A `test_NAME.py` beside the
    recipe is its test.
    """
    base = recipe.parent
    found = [recipe, recipe.with_suffix(".yaml")]
    others = {path for path in base.iterdir() if path.is_file() and path.suffix != ".md"}
    others -= {file.with_suffix(ending) for file in shipped_recipes().values() for ending in (".py", ".yaml")}
    test = base / f"test_{recipe.stem}.py"
    for file in found:  # it grows
        text = file.read_text(encoding="utf-8")
        needed = _defaults(file, base) if file.suffix == ".yaml" else []
        needed += _imports(file, base) if file.suffix == ".py" else []
        needed += sorted(path for path in others if path.name in text or path == test)
        found += [path for path in dict.fromkeys(needed) if path not in found]
    return found


def _chat_form(name: str) -> Path:
    recipes, base_name = shipped_recipes(), name.removesuffix(CHAT)
    find_recipe(name)
    if base_name + CHAT in recipes:
        return recipes[base_name + CHAT]
    with_chat = ", ".join(known.removesuffix(CHAT) for known in recipes if known.endswith(CHAT))
    raise ConfigError(f"{name} has no chat form; remove --chat, or start from one that has: {with_chat}")


def _defaults(file: Path, base: Path) -> list[Path]:
    """Return the files beside the recipe that the defaults list of a YAML file names."""
    found: list[Path] = []
    for entry in read_yaml(file).get("defaults", ()):
        if isinstance(entry, str):
            found.append((base if entry.startswith("/") else file.parent) / f"{entry.lstrip('/')}.yaml")
            continue
        for key, option in entry.items():
            group = str(key).rpartition(" ")[2].partition("@")[0].strip("/")
            found += sorted((base / group).glob("*.yaml")) if group else [base / f"{option}.yaml"]
    return [path for path in found if path.is_file()]


def _imports(file: Path, base: Path) -> list[Path]:
    """Return the modules beside the recipe that a Python file imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.append(node.module)
    return [path for path in (base / f"{name}.py" for name in names) if path.is_file()]


def _local_names(text: str, files: list[Path]) -> str:
    """Return text that names copied files by their own names, and other recipes as shipped ones."""
    copied = {file.relative_to(shipped_directory("recipes")).as_posix(): file.name for file in files}

    def local_name(match: re.Match[str]) -> str:
        name, ending = match.groups()
        return copied.get(name + ending, name if ending == ".py" else name + ending)

    return _NAMED.sub(local_name, text)


def _test_text(recipe: Path) -> str:
    """Return the test of a recipe. Its run is left out if the model is no checkpoint that hflow has."""
    config, _, bodies = read_recipe(recipe)
    has_score = _is_exact(bodies)
    can_run = all(model.path is None or model.architecture is not None for model in config.models.values())
    can_run = can_run and not any(DATASET_PREFIX in str(data.path) for data in config.data.values())
    imports = "import hflow\n"
    if has_score:
        imports = f"from {recipe.stem} import score\n\n{imports}"
    if can_run:
        imports += "from hflow.testing import try_recipe\n"
    bodies_text = _SCORE_TEST * has_score + _RUN_TEST * can_run
    text = _TEST.format(stem=recipe.stem, imports=imports, bodies=bodies_text)
    return text if can_run else text.replace("import math\n", "")


def _is_exact(bodies: Mapping[str, Callable[..., Any]]) -> bool:
    """Return whether a recipe has a body `score` that gives 1 to the right answer and 0 to another."""
    body = bodies.get("score")
    if body is None or [*inspect.signature(body).parameters] != ["completion", "answer"]:
        return False
    return bool(body("042", "042") == 1 and body("999", "042") == 0)
