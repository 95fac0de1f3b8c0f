"""Exit codes other than 0.

Writing the pages of `--html FILE`.

Arguments shared by several commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hflow.base.errors import ConfigError
from hflow.base.shipped import find_recipe, is_recipe_file, shipped_recipes

DIFFERENT = 1
"""`hflow plan --diff` or `hflow twin` found a difference."""
USER_ERROR = 2
"""An error that the user can fix; it was printed in one line."""
RESUMABLE = 75
"""A run was stopped by Ctrl-C, SIGTERM or SIGHUP before its last step; `hflow run --resume` continues it. It
is the system's code for a temporary failure, on which schedulers may try again."""
INTERRUPTED = 130


class StoppedByUser(Exception):
    """Ctrl-C ended a command that had printed what it did."""


class RunStopped(Exception):
    """A run was stopped before its last step, and its summary was printed."""


def write_html(file: Path, page: str) -> None:
    """Write a page.

    Raises:
        ConfigError: if the file cannot be written.
    """
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: cannot write {file}: {error.strerror or error}") from error


OVERRIDES = (
    "Keys of the configuration to change, such as steps=10, models.actor.optim.lr=3e-4 or "
    "nodes.actor_train.clip=0.1."
)

RECIPE = "The name of a shipped recipe, such as grpo, or a recipe's Python file, such as mine/grpo.py."


def is_override(argument: str) -> bool:
    """Return whether an argument is an override and not a recipe: it starts with `~` or contains `=`."""
    return "=" in argument or argument.startswith("~")


def recipe_file(recipe: str) -> str:
    """Return the path of a recipe's file. Warn if a shipped recipe has the name of a file here.

    Raises:
        ConfigError: for an override in place of the recipe.
        RecipeError: if there is no shipped recipe of this name.
    """
    if is_override(recipe):
        raise ConfigError(f"name a recipe before {recipe}, as in grpo {recipe}")
    file = find_recipe(recipe)
    own = Path(f"{recipe}.py")
    if not is_recipe_file(recipe) and own.is_file() and not own.samefile(file):
        typer.echo(
            f"warning: {recipe} is the recipe that comes with hflow; for the file here write {own}", err=True
        )
    return str(file)


def recipe_name(file: str) -> str:
    """Return the user's name of a recipe: the name of a shipped recipe, else the file."""
    return next((name for name, path in shipped_recipes().items() if str(path) == file), file)


def optional_recipe_file(recipe: str | None) -> str | None:
    """Return the path of a recipe's file. An override in its place, and None, are returned as they are."""
    return recipe if recipe is None or is_override(recipe) else recipe_file(recipe)


Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help=RECIPE, callback=recipe_file, show_default=False)
]
OptionalRecipe = Annotated[
    str | None,
    typer.Argument(metavar="RECIPE", help=RECIPE, callback=optional_recipe_file, show_default=False),
]


def distinct_keys(overrides: list[str] | None) -> list[str] | None:
    """Return overrides, of which no two set the same key.

    Raises:
        ConfigError: naming two that do.
    """
    seen: dict[str, str] = {}
    for override in overrides or ():
        key, is_setting, _ = override.lstrip("+").partition("=")
        if is_setting and key in seen:
            raise ConfigError(f"{seen[key]} and {override} set the same key; remove one of them")
        seen[key] = override
    return overrides


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help=OVERRIDES, callback=distinct_keys, show_default=False),
]


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page for a browser to FILE.")
]
Live = Annotated[
    bool | None,
    typer.Option(
        "--live/--plain", help="Show a live panel, or plain lines.", show_default="live in a terminal"
    ),
]
ModelOfRun = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="The model of a run.", show_default="its only one"),
]
Port = Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port; 0 for a free one.")]


def split_recipe(recipe: str | None, overrides: list[str]) -> tuple[str | None, list[str]]:
    """Separate an optional recipe from overrides.

    Raises:
        ConfigError: if two of them set the same key.
    """
    if recipe is not None and is_override(recipe):
        changes = [recipe, *overrides]
        distinct_keys(changes)
        return None, changes
    return recipe, overrides
