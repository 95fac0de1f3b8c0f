"""`hflow size`: the cluster that a recipe needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hflow import launch
from hflow.cli.arguments import Overrides, Recipe
from hflow.cli.plan_commands import write_page
from hflow.errors import PlanError
from hflow.report.figures_text import render_sizes, size_table
from hflow.terminal import print_json, show

ON = (
    "A cluster, such as h100-4x8, or a device, such as h100: 1, 2, 4, ... devices of it, eight to a machine. "
    "May be repeated."
)


def size(
    recipe: Recipe,
    overrides: Overrides = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="S", help="Target: at most S seconds a step.")
    ] = None,
    samples: Annotated[
        float | None, typer.Option("--samples", metavar="N", help="Target: at least N samples per second.")
    ] = None,
    days: Annotated[
        float | None, typer.Option("--days", metavar="D", help="Target: at most D days for the whole run.")
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option("--on", metavar="CLUSTER", help=ON, show_default="the configured cluster's device"),
    ] = None,
    most: Annotated[int, typer.Option("--most", metavar="N", min=1, help="Devices to try at most.")] = 1024,
    cheapest: Annotated[
        bool, typer.Option("--cheapest", help="Choose the lowest cost of the run, not the fewest devices.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the page of the chosen plan, with the sizes."),
    ] = None,
) -> None:
    """Find the smallest or the cheapest cluster on which a recipe reaches a target. Needs no device."""
    target = launch.Target(seconds, samples, days)
    found = launch.size(recipe, overrides or [], target, on=on or (), most=most, cheapest=cheapest)
    if html is not None and found.compiled is not None:
        write_page(found.compiled, html, size_table(found))
    if json:
        print_json(found.to_json())
    else:
        show(render_sizes(found))
    if found.problem is not None:
        raise PlanError(found.problem)
