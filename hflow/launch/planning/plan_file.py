"""Plan files: a recipe's path, its whole configuration and its plan in one JSON file.

A plan file locks a run. `hflow run --plan` compiles the recipe again with the stored configuration, and runs
the result only if it equals the stored plan, row by row. Rows that were read from a file are never executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hflow.base.errors import ConfigError, PlanError, RecipeError
from hflow.base.files import read_json
from hflow.base.shipped import is_recipe_file
from hflow.base.validation import from_mapping
from hflow.config import RunConfig, load_config, to_yaml
from hflow.planner.diff import diff_plans
from hflow.planner.plan.forecast import Candidate
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.serialise import is_left_out, rows_digest

FORMAT = 3
"""Format of plan files. It is raised when rows change so that older files cannot be compared."""

_NOTES = ("warnings", "engines", "attention", "layers", "unrunnable")
"""Lists in a plan that are not part of its digest."""
_KEYS: Mapping[str, type] = {"recipe": str, "config": dict, "plan": dict}


@dataclass(frozen=True)
class PlanFile:
    """The content of a plan file."""

    path: Path
    recipe: str
    """The recipe's file: relative to the working directory of `hflow plan` if it was in it, else absolute."""
    config: Mapping[str, Any]
    """The whole configuration as plain values."""
    rows: Mapping[str, Any]
    """The plan as `to_json` returns it."""

    @property
    def engines(self) -> dict[str, str]:
        """The engine of each model that generates."""
        replicas = self.rows["replicas"]
        return {row["model"]: row["backend"] for row in replicas if row["role"] == "gen"}

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The placements that the plan was compared with when it was searched for."""
        rows = (self.rows["forecast"] or {}).get("candidates", ())
        return tuple(
            Candidate(**{**row, "settings": tuple((key, value) for key, value in row["settings"])})
            for row in rows
        )

    @property
    def backend(self) -> str:
        """The training backend that the planner chose, with the reason; empty if it did not."""
        return str((self.rows["forecast"] or {}).get("backend", ""))

    def configuration(self, overrides: Sequence[str] = ()) -> RunConfig:
        """Return the stored configuration with overrides.

        Raises:
            ConfigError: for a key or value, stored or overridden, that this version does not know.
        """
        try:
            config = from_mapping(RunConfig, self.config)
        except ConfigError as error:
            raise ConfigError(
                f"{self.path}: its configuration does not fit this version of hflow: {error}; "
                f"{_fix(self.path)}"
            ) from error
        return with_overrides(config, overrides)


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return a whole configuration with overrides.

    Raises:
        ConfigError: for an override that does not fit.
    """
    if not overrides:
        return config
    with TemporaryDirectory() as directory:
        (Path(directory) / "plan.yaml").write_text(to_yaml(config), encoding="utf-8")
        return load_config(Path(directory) / "plan.py", overrides, Path.cwd())


def read_plan_file(path: str | Path) -> PlanFile:
    """Read a plan file, or the plan file in a run's directory.

    Raises:
        ConfigError: for anything else.
    """
    file = _resolve(Path(path))
    values = read_json(file, "plan file")
    _check(file, values)
    return PlanFile(file, values["recipe"], values["config"], values["plan"])


def compose_plan_file(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """Return the configuration of a plan file with overrides, as YAML."""
    return to_yaml(read_plan_file(path).configuration(overrides))


def recipe_file(file: PlanFile, recipe: str | Path | None = None) -> Path:
    """Return the recipe of a plan file.

    Raises:
        RecipeError: if it is not where the plan was made.
    """
    if recipe is None and not is_recipe_file(file.recipe):
        name = Path(file.recipe).name
        raise RecipeError(
            f"{file.path} is a plan of a recipe {name!r} that was defined in a notebook or a shell; continue "
            f"there with hflow.resume({str(file.path.parent)!r}, recipe=recipe), or write the recipe to a "
            f"file and name it: hflow run --plan {file.path} {name}.py"
        )
    path = Path(file.recipe if recipe is None else recipe)
    if path.is_file():
        return path
    if recipe is not None:
        raise RecipeError(f"there is no recipe file {str(recipe)!r}")
    raise RecipeError(
        f"{file.path} is a plan of {file.recipe!r}, which does not exist here; run hflow in the directory "
        f"where the plan was made, or name the recipe: hflow run --plan {file.path} RECIPE"
    )


def _resolve(path: Path) -> Path:
    """Return the plan file that a path names: the path itself, or the file in a run's directory."""
    if not path.is_dir():
        return path
    if (path / "plan.json").is_file():
        return path / "plan.json"
    newest = path / "latest"
    hint = f"; the newest run in it is {newest}" if (newest / "plan.json").is_file() else ""
    raise ConfigError(f"{path} is not a run's directory: it has no plan.json{hint}")


def _check(file: Path, values: Any) -> None:
    if not isinstance(values, dict) or "format" not in values:
        raise ConfigError(f"{file} is not a plan file; `hflow plan RECIPE --json` prints one")
    if values["format"] != FORMAT or isinstance(values["format"], bool):
        raise ConfigError(
            f"{file} has format {values['format']!r}, but this version of hflow reads format {FORMAT}; "
            f"{_fix(file)}"
        )
    for key, kind in _KEYS.items():
        if not isinstance(values.get(key), kind):
            raise ConfigError(f"{file} is not a plan file: its {key!r} is missing or damaged; {_fix(file)}")
    rows = values["plan"]
    try:
        diff_plans(rows, rows)
        digest = rows_digest(rows)
    except PlanError as error:
        raise ConfigError(f"{file}: {error}; {_fix(file)}") from error
    missing = [row.name for row in fields(Plan) if row.name not in rows and not is_left_out(row)]
    damaged = [name for name in _NOTES if not isinstance(rows.get(name), list)]
    if missing or damaged or rows["digest"] != digest:
        if missing or damaged:
            what = f"has no {[*missing, *damaged][0]!r}"
        else:
            what = "does not have the digest that it states"
        raise ConfigError(f"{file} was changed by hand: its plan {what}; {_fix(file)}")


def _fix(file: Path) -> str:
    """Return the advice for a plan file that cannot be read: for a run's, how to keep its weights."""
    checkpoints = file.parent / "checkpoints"
    if not checkpoints.is_dir():
        return "create it again with `hflow plan RECIPE --json`"
    return (
        "use the version of hflow that wrote it, or begin another run with "
        f"models.NAME.path={checkpoints}/latest/NAME models.NAME.resume=true"
    )
