"""Arguments that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

OVERRIDES = "Configuration: steps=10, models.actor.optim.lr=3e-4, nodes.actor_train.clip=0.1 and so on."

Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="The recipe's Python file.", show_default=False)
]
MaybeRecipe = Annotated[
    str | None,
    typer.Argument(metavar="RECIPE", help="The recipe's Python file.", show_default=False),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help=OVERRIDES, show_default=False)
]


def split(recipe: str | None, overrides: list[str]) -> tuple[str | None, list[str]]:
    """A recipe that may be left out, and overrides: `~key` and all that has a `=`."""
    if recipe is not None and ("=" in recipe or recipe.startswith("~")):
        return None, [recipe, *overrides]
    return recipe, overrides
