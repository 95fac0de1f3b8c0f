"""`load_recipe`: import a recipe file and find the `Recipe` in it."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from hflow.base.errors import HflowError, RecipeError, nearest, shorten
from hflow.base.files import resolved
from hflow.base.recipe_files import MODULE_PREFIX, use_directory
from hflow.base.shipped import shipped_recipes
from hflow.dsl.recipe import Recipe
from hflow.graph.errors import relative_path


def load_recipe(path: str | Path) -> Recipe:
    """Import a recipe file and return the one `Recipe` in it. It can import modules beside it.

    Raises:
        RecipeError: if the file does not exist, is not Python, raises an exception, or does not hold exactly
            one `Recipe`.
    """
    file = Path(path)
    if not file.is_file():
        neighbours = [other.name for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
        shipped = next((name for name in shipped_recipes() if Path(name).name == file.stem), None)
        hint = nearest(file.name, neighbours)
        if shipped is not None and not hint:
            hint = f"; did you mean {shipped!r}, which comes with hflow?"
        raise RecipeError(f"there is no recipe file {str(path)!r}{hint}")
    module = _import(resolved(file))
    recipes = [value for value in vars(module).values() if isinstance(value, Recipe)]
    if len(recipes) == 1:
        return recipes[0]
    shown = relative_path(str(resolved(file)))
    if not recipes:
        raise RecipeError(
            f"{shown}: the file has no Recipe(...). Add 'recipe = Recipe(NAME, DATASET, NODES)'"
        )
    names = ", ".join(recipe.name for recipe in recipes)
    raise RecipeError(f"{shown}: the file has {len(recipes)} recipes ({names}). Keep one")


def _import(file: Path) -> ModuleType:
    name = MODULE_PREFIX + file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{file}: a recipe must be a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    use_directory(file.parent)
    try:
        spec.loader.exec_module(module)
    except HflowError:
        raise
    except SyntaxError as error:
        shown = relative_path(error.filename or str(file))
        raise RecipeError(f"{shown}:{error.lineno}: {error.msg}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a recipe may also call sys.exit()
        line = _line_in(file, error)
        what = f"{type(error).__name__}: {_first_line(error)}"
        raise RecipeError(f"{relative_path(str(file))}:{line}: {what}{_meant(error)}") from error
    return module


def _meant(error: BaseException) -> str:
    """Return which name of a module was probably meant, such as `"; did you mean 'group_advantage'?"`."""
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        return nearest(error.name or "", dir(error.obj))
    return ""


def _first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, if it has one that can be printed."""
    try:
        return shorten(str(error).strip().partition("\n")[0], 500)
    except Exception:  # noqa: BLE001 - raised by the recipe's own exception class
        return "its message cannot be printed"


def _line_in(file: Path, error: BaseException) -> int:
    """Return the innermost line of the file in an exception's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 0 for f in reversed(frames) if f.filename == str(file)), 0)
