"""Arguments shared by several commands."""

from __future__ import annotations

from typing import Annotated

import typer

OVERRIDES = (
    "Keys of the configuration to change, such as steps=10, models.actor.optim.lr=3e-4 or "
    "nodes.actor_train.clip=0.1."
)

Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="The recipe's Python file.", show_default=False)
]
OptionalRecipe = Annotated[
    str | None,
    typer.Argument(metavar="RECIPE", help="The recipe's Python file.", show_default=False),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help=OVERRIDES, show_default=False)
]


def split_recipe(recipe: str | None, overrides: list[str]) -> tuple[str | None, list[str]]:
    """Separate an optional recipe from overrides, which start with `~` or contain `=`."""
    if recipe is not None and ("=" in recipe or recipe.startswith("~")):
        return None, [recipe, *overrides]
    return recipe, overrides
