"""Plan files: a recipe's path, its whole configuration and its plan in one JSON document.

A plan file is a lock. Its recipe is compiled again with its configuration, and what comes out is run only
if it is the plan in the file, row by row; so nothing that a run does is read from the file itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hflow.config import RunConfig, load_config, to_mapping, to_yaml
from hflow.errors import ConfigError, PlanError, RecipeError
from hflow.launch.compile import Compiled, compile_recipe
from hflow.planner.diff import PlanDiff, diff_plans, more
from hflow.planner.serialise import to_json
from hflow.validation import from_mapping

FORMAT = 1
"""Format of plan files: rises when rows change so that older ones cannot be compared."""

_PARTS: Mapping[str, type] = {"recipe": str, "config": dict, "plan": dict}


@dataclass(frozen=True)
class PlanFile:
    """What a plan file holds."""

    path: Path
    recipe: str
    """The recipe's file: relative to the working directory where it lay in it, else absolute."""
    config: Mapping[str, Any]
    """The whole configuration in plain values."""
    rows: Mapping[str, Any]
    """The plan as `to_json` gives it."""

    def configured(self, overrides: Sequence[str] = ()) -> RunConfig:
        """The stored configuration with overrides.

        Raises:
            ConfigError: for a key or value that this version does not know, stored or given.
        """
        try:
            config = from_mapping(RunConfig, self.config)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: its configuration does not fit this version: {error}") from error
        if not overrides:
            return config
        with TemporaryDirectory() as directory:
            (Path(directory) / "plan.yaml").write_text(to_yaml(config), encoding="utf-8")
            return load_config(Path(directory) / "plan.py", overrides)


def document(compiled: Compiled) -> str:
    """The plan file of a compiled recipe, as indented JSON."""
    recipe, here = compiled.recipe.absolute(), Path.cwd()
    lies_here = recipe.is_relative_to(here)
    values = {
        "format": FORMAT,
        "recipe": (recipe.relative_to(here) if lies_here else recipe).as_posix(),
        "config": to_mapping(compiled.config),
        "plan": to_json(compiled.plan),
    }
    return json.dumps(values, indent=2)


def read_plan_file(path: str | Path) -> PlanFile:
    """Read a plan file, or that of a run's directory.

    Raises:
        ConfigError: for anything else.
    """
    file = _file_of(Path(path))
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the plan file {str(file)!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is no plan file: it is not JSON: {error}") from error
    _check(file, values)
    return PlanFile(file, values["recipe"], values["config"], values["plan"])


def compose_locked(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """The configuration of a plan file, with overrides, as YAML."""
    return to_yaml(read_plan_file(path).configured(overrides))


def compile_locked(
    path: str | Path, recipe: str | Path | None = None, overrides: Sequence[str] = ()
) -> Compiled:
    """Compile the recipe of a plan file with its configuration, to exactly its plan.

    Args:
        path: a plan file or a run's directory.
        recipe: where the recipe lies now; None: where it lay.
        overrides: configuration to change, as `out=elsewhere`.

    Raises:
        ConfigError: for a file that is no plan file, or overrides that do not fit.
        PlanError: where the plan is another one now, naming the first change.
        RecipeError: where there is no recipe.
    """
    file = read_plan_file(path)
    where, config = _recipe_of(file, recipe), file.configured(overrides)
    try:
        compiled = compile_recipe(where, config=config)
    except (ConfigError, PlanError, RecipeError) as error:
        raise PlanError(f"{file.path} no longer fits: {error}") from error
    diff = diff_plans(file.rows, to_json(compiled.plan))
    if diff.decided:
        command = shlex.join(["hflow", "plan", "--diff", str(file.path), str(where), *overrides])
        others = more(len(diff.decided) - 1)
        raise PlanError(f"{file.path} no longer fits: {diff.decided[0]}{others}; see `{command}`")
    return compiled


def compare(before: str, after: str, overrides: Sequence[str] = ()) -> PlanDiff:
    """Compare two plans.

    Args:
        before: a plan file, a run's directory, or a recipe (`.py`), which is compiled.
        after: likewise.
        overrides: configuration of the recipes among them.

    Raises:
        HflowError: for an operand that is none of these, or a recipe that cannot be compiled.
    """
    if overrides and not (_is_recipe(before) or _is_recipe(after)):
        raise ConfigError(
            f"{overrides[0]} changes nothing: neither {before!r} nor {after!r} is a recipe (a .py file)"
        )
    return diff_plans(_rows(before, overrides), _rows(after, overrides))


def _rows(operand: str, overrides: Sequence[str]) -> Mapping[str, Any]:
    if _is_recipe(operand):
        return to_json(compile_recipe(operand, overrides).plan)
    return read_plan_file(operand).rows


def _is_recipe(operand: str) -> bool:
    return Path(operand).suffix == ".py"


def _recipe_of(file: PlanFile, given: str | Path | None) -> Path:
    found = Path(file.recipe if given is None else given)
    if found.is_file():
        return found
    if given is not None:
        raise RecipeError(f"there is no recipe file {str(given)!r}")
    raise RecipeError(
        f"{file.path} is a plan of {file.recipe!r}, which is not here; run it from the directory that it was "
        f"made in, or name the recipe: hflow run --plan {file.path} RECIPE"
    )


def _file_of(path: Path) -> Path:
    """The plan file that a path names: itself, or the one in a run's directory."""
    if not path.is_dir():
        return path
    if (path / "plan.json").is_file():
        return path / "plan.json"
    newest = path / "latest"
    hint = f"; the newest run in it is {newest}" if (newest / "plan.json").is_file() else ""
    raise ConfigError(f"{path} is no run's directory: it has no plan.json{hint}")


def _check(file: Path, values: Any) -> None:
    """Refuse what is no plan file of this format."""
    if not isinstance(values, dict) or "format" not in values:
        raise ConfigError(f"{file} is no plan file; `hflow plan RECIPE --json` prints one")
    if values["format"] != FORMAT:
        raise ConfigError(
            f"{file} has format {values['format']!r}, but this version of hflow reads format {FORMAT}; make "
            f"it again with `hflow plan RECIPE --json`"
        )
    for part, kind in _PARTS.items():
        if not isinstance(values.get(part), kind):
            raise ConfigError(f"{file} is no plan file: its {part!r} is missing or not as hflow writes it")
    try:
        diff_plans(values["plan"], values["plan"])
    except PlanError as error:
        raise ConfigError(f"{file}: {error}") from error
