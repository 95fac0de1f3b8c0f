"""The files that come with hflow: recipes, configuration groups and checkpoints.

A wheel holds them in the package, as `hflow/recipes` and `hflow/configs`; in the source tree they are beside
it. A shipped recipe is known by its name, `grpo` or `custom/replay`: its path in `recipes` without `.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hflow.base.errors import ConfigError, RecipeError, nearest

CHECKPOINT_PREFIX = "hflow:"
"""Prefix of the name of a shipped checkpoint, where a path is expected."""
SMOLLM2 = "hflow:smollm2"
"""The name of a checkpoint that each machine makes of an installed package (`models.smollm2`)."""


def shipped_directory(name: Literal["recipes", "configs"]) -> Path:
    """Return a directory of shipped files: in the installed package, or in the source tree."""
    package = Path(__file__).parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def shipped_recipes() -> dict[str, Path]:
    """Return the files of all shipped recipes by name: each Python file with a YAML file beside it."""
    directory = shipped_directory("recipes")
    files = (file for file in sorted(directory.rglob("*.py")) if file.with_suffix(".yaml").is_file())
    return {file.relative_to(directory).with_suffix("").as_posix(): file for file in files}


def is_recipe_file(recipe: str) -> bool:
    """Return whether a recipe is named by its file, and not as a shipped one."""
    return recipe.endswith(".py")


def session_recipe(name: str) -> Path:
    """Return the path in the place of a recipe's file, if it is defined in a notebook or a shell.

    There is no such file, but a YAML file beside it configures the recipe.
    """
    return Path.cwd() / name


def find_recipe(recipe: str) -> Path:
    """Return the file of a shipped recipe, or a path that ends in `.py` as it is.

    Raises:
        RecipeError: if there is no shipped recipe of this name.
    """
    if is_recipe_file(recipe):
        return Path(recipe)
    recipes = shipped_recipes()
    if recipe in recipes:
        return recipes[recipe]
    inner = [name for name in recipes if name.rpartition("/")[2] == recipe]
    hint = f"; did you mean {inner[0]!r}?" if inner else nearest(recipe, recipes)
    if not hint:
        hint = f"; shipped recipes: {', '.join(recipes)}"
    own = f"{recipe.rstrip('/')}.py"
    if Path(own).is_file():
        hint = f"; to use the file, write {own}"
    raise RecipeError(f"there is no shipped recipe {recipe!r}, and a recipe's file ends in .py{hint}")


def find_checkpoint(name: str, key: str) -> Path:
    """Return the directory of a shipped checkpoint; its name begins with `CHECKPOINT_PREFIX`.

    Raises:
        ConfigError: if there is no such checkpoint.
    """
    directory = shipped_directory("configs") / "checkpoints"
    known = sorted(path.name for path in directory.iterdir())
    wanted = name.removeprefix(CHECKPOINT_PREFIX)
    if wanted not in known:
        names = " and ".join([*(CHECKPOINT_PREFIX + name for name in known), SMOLLM2])
        raise ConfigError(
            f"{key} is {name!r}, but the checkpoints that come with hflow are {names}; set it to one of "
            "these or to a checkpoint's directory"
        )
    return directory / wanted
