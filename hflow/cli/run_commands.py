"""`hflow run` and `twin`: what starts workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from hflow import launch
from hflow.cli.arguments import MaybeRecipe, Overrides, Recipe, split
from hflow.cli.exit_codes import DIFFERENT, StoppedByUser
from hflow.errors import ConfigError
from hflow.report.summary import RunSummary
from hflow.report.twin_text import render_twin
from hflow.terminal import print_text, show

STOPPED = "stopped"
"""Why a run ended that the user interrupted."""
LOCKED = (
    "Run exactly the plan of a plan file or of a run's directory, or say what is out of date. RECIPE: where "
    "it lies now."
)
LAYOUT = (
    "Every model in this layout, on megatron-core; may be given several times. Without: all pairs of axes, "
    "and all three."
)


def run(
    recipe: MaybeRecipe = None,
    overrides: Overrides = None,
    plan: Annotated[
        str | None, typer.Option("--plan", metavar="FILE", help=LOCKED, show_default=False)
    ] = None,
    cfg: Annotated[bool, typer.Option("--cfg", help="Print the configuration and stop.")] = False,
    live: Annotated[
        bool | None,
        typer.Option("--live/--plain", help="A live panel or plain lines.", show_default="by terminal"),
    ] = None,
) -> None:
    """Run a recipe; results lie in OUT/NAME/TIME, and OUT/NAME/latest points there."""
    if plan is not None:
        recipe, changes = split(recipe, overrides or [])
        if cfg:
            print_text(launch.compose_plan_file(plan, changes))
        else:
            _finish(launch.run_plan(plan, recipe, changes, live))
    elif recipe is not None:
        if cfg:
            print_text(launch.compose_recipe(recipe, overrides or []))
        else:
            _finish(launch.run(recipe, overrides or [], live))
    else:
        raise ConfigError("name a recipe, as in `hflow run recipes/grpo.py`, or a plan with --plan FILE")


def twin(
    recipe: Recipe,
    overrides: Overrides = None,
    layout: Annotated[
        list[str] | None, typer.Option("--layout", metavar="LAYOUT", help=LAYOUT, show_default=False)
    ] = None,
    as_configured: Annotated[
        bool, typer.Option("--as-configured", help="Compare the layouts and backends of the configuration.")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Training steps.")] = 3,
) -> None:
    """Run a recipe in one process and divided over many; losses, gradients and weights must be equal."""
    if as_configured and layout:
        raise ConfigError("--as-configured compares the configuration's layouts; leave out --layout")
    layouts = None if as_configured else layout or []
    found = launch.twin(recipe, overrides or [], layouts, steps, _tell)
    show(render_twin(Path(recipe).stem, steps, found.results, found.notes))
    if not all(result.is_equal for result in found.results):
        raise typer.Exit(DIFFERENT)


def _finish(summary: RunSummary) -> None:
    """Print how a run ended."""
    show(summary.render())
    if summary.reason == STOPPED:
        raise StoppedByUser


def _tell(line: str) -> None:
    """Say what goes on, apart from the report."""
    Console(stderr=True).print(Text(line, style="dim"))
