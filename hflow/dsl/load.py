"""`load_recipe`: from a path to a `Recipe`."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from hflow.dsl.recipe import Recipe
from hflow.dsl.source_location import relative_path
from hflow.errors import HflowError, RecipeError, nearest

PREFIX = "hflow_recipe_"
"""Begins the module name of a recipe file, so that it hides no other module.

Such a module is in `sys.modules` but not importable elsewhere: whoever ships its bodies registers it
with cloudpickle's `register_pickle_by_value`.
"""


def load_recipe(path: str | Path) -> Recipe:
    """Import a recipe file and return the one `Recipe` in it.

    Raises:
        RecipeError: when the file is missing, is not Python, raises, or holds no or several recipes.
    """
    file = Path(path)
    if not file.is_file():
        near = (
            nearest(file.name, (other.name for other in file.parent.glob("*.py")))
            if file.parent.is_dir()
            else ""
        )
        raise RecipeError(f"there is no recipe file {str(path)!r}{near}")
    module = _import(file.resolve())
    recipes = [value for value in vars(module).values() if isinstance(value, Recipe)]
    if len(recipes) != 1:
        many = f"it has {len(recipes)} recipes: {', '.join(recipe.name for recipe in recipes)}; keep one"
        raise RecipeError(
            f"{relative_path(str(file.resolve()))}: {many if recipes else 'it has no Recipe(...)'}"
        )
    return recipes[0]


def _import(file: Path) -> ModuleType:
    name = PREFIX + file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{file}: a recipe is a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except HflowError:
        raise
    except SyntaxError as error:
        raise RecipeError(
            f"{relative_path(error.filename or str(file))}:{error.lineno}: {error.msg}"
        ) from error
    except Exception as error:
        line = _line_in(file, error)
        text = str(error).splitlines()[0] if str(error) else ""
        raise RecipeError(f"{relative_path(str(file))}:{line}: {type(error).__name__}: {text}") from error
    return module


def _line_in(file: Path, error: Exception) -> int:
    """The last line of the file that was running when the error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 0 for f in reversed(frames) if f.filename == str(file)), 0)
