"""`hflow new`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hflow import launch
from hflow.terminal import print_text


def new(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The name of a shipped recipe, such as grpo.", show_default=False
        ),
    ],
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Where to write. Existing files are kept.", show_default=False),
    ],
    chat: Annotated[
        bool, typer.Option("--chat", help="The chat form of the recipe: its prompts are messages.")
    ] = False,
) -> None:
    """Write a shipped recipe, its YAML and a test to a directory, ready to edit."""
    made = launch.new_recipe(recipe, directory, chat=chat)
    for file in made.files:
        print_text(str(file))
    name = made.recipe.name
    print_text(f"next: cd {directory} && hflow run {name} steps=3 && pytest")
