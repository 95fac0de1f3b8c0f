"""hflow new, translate and nodes: a recipe of one's own, and what it can be made of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hflow import launch
from hflow.base.errors import ConfigError
from hflow.base.shipped import is_recipe_file, shipped_recipes
from hflow.base.terminal import print_json, print_text, show
from hflow.cli.arguments import AsJson, recipe_file

if TYPE_CHECKING:
    from hflow.launch import CatalogNode, CatalogSetting


Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Where to write. Existing files are kept.", show_default=False)
]


def new(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The name of a shipped recipe, such as grpo.", show_default=False
        ),
    ],
    directory: Directory,
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


def translate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A configuration of verl (its whole YAML, or Hydra's list of overrides) or of TRL's GRPO.",
            show_default=False,
        ),
    ],
    directory: Directory,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="The devices, such as h100-1x8.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what became of each key as JSON.")] = False,
) -> None:
    """Write a configuration of verl or TRL as a recipe with its YAML, and list what is left to do."""
    made = launch.translate(file, directory, cluster)
    if json:
        print_json(made.to_json())
    else:
        from hflow.report.text.translation import render_translation

        show(render_translation(made))


_FIRST_HELP = (
    "A ready node, an optimizer or lora, such as actor_train or muon; or a recipe: the name of a shipped one "
    "or a Python file. Default: list all ready nodes, optimizers and adapters."
)


def nodes(
    subject: Annotated[
        str | None, typer.Argument(metavar="NAME|RECIPE", help=_FIRST_HELP, show_default=False)
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A node of the recipe. Default: list all.", show_default=False),
    ] = None,
    json: AsJson = False,
) -> None:
    """List the ready nodes, rewards and optimizers, or nodes of a recipe, or all that can be set of one."""
    from hflow.report.text.nodes import render_nodes, render_recipe_nodes

    if subject is None:
        ready, settings = launch.ready_nodes(), launch.ready_settings()
        if json:
            print_json([*(node.to_json() for node in ready), *(setting.to_json() for setting in settings)])
        else:
            show(render_nodes(ready, settings))
    elif is_recipe_file(subject) or subject in shipped_recipes():
        found = launch.recipe_nodes(recipe_file(subject), name)
        if name is None:
            if json:
                print_json([node.to_json() for node in found])
            else:
                show(render_recipe_nodes(subject, found))
        else:
            _show_one(found[0], json)
    elif name is not None:
        raise ConfigError(f"{subject} is not a recipe, which {name} could be a node of; name its .py file")
    else:
        _show_one(launch.ready_node(subject), json)


def _show_one(found: CatalogNode | CatalogSetting, json: bool) -> None:
    from hflow.report.text.nodes import render_node, render_setting

    if json:
        print_json(found.to_json())
    elif isinstance(found, launch.CatalogSetting):
        show(render_setting(found))
    else:
        show(render_node(found))
