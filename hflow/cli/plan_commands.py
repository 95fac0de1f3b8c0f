"""`hflow check`, `plan` and `simulate`: what needs no device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from hflow import launch
from hflow.cli.arguments import MaybeRecipe, Overrides, Recipe, split
from hflow.cli.exit_codes import DIFFERENT
from hflow.errors import ConfigError
from hflow.report.diff_text import render_diff
from hflow.report.graph_text import plan_dot, plan_mermaid, render_graph
from hflow.report.plan_text import render_plan
from hflow.report.simulation_text import render_simulation
from hflow.terminal import print_text, show

DIFF = (
    "Compare two plans and say what a resume would have to do. Each is a plan file, a run's directory or a "
    "recipe, compiled with the KEY=VALUEs. Exit code 1 where they differ."
)
PRINTED: Mapping[str, Callable[[launch.Compiled], str]] = {
    "--json": launch.plan_file_text,
    "--dot": lambda compiled: plan_dot(compiled.plan),
    "--mermaid": lambda compiled: plan_mermaid(compiled.plan),
}
"""Options that print a plan for other programs."""


def check(recipe: Recipe, overrides: Overrides = None) -> None:
    """Read a recipe, bind every parameter, refuse what cannot be right, and print the graph."""
    show(render_graph(launch.check(recipe, overrides or [])))


def plan(
    recipe: MaybeRecipe = None,
    overrides: Overrides = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print a plan file, or with --diff the changes.")
    ] = False,
    dot: Annotated[bool, typer.Option("--dot", help="Print a drawing for Graphviz.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a drawing for Mermaid.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page for a browser.")
    ] = None,
    diff: Annotated[
        tuple[str, str] | None, typer.Option("--diff", metavar="A B", help=DIFF, show_default=False)
    ] = None,
) -> None:
    """Lay the graph out on a cluster and print where, when and which bytes; no device is needed."""
    chosen = _at_most_one({"--json": json, "--dot": dot, "--mermaid": mermaid})
    if diff is not None:
        if html is not None or chosen not in (None, "--json"):
            raise ConfigError(f"--diff prints text or --json; leave out {'--html' if html else chosen}")
        _compare(*diff, *split(recipe, overrides or []), as_json=chosen is not None)
    elif recipe is not None:
        _show_plan(launch.compile_recipe(recipe, overrides or []), chosen, html)
    else:
        raise ConfigError("name a recipe, as in `hflow plan recipes/grpo.py`, or two plans with --diff A B")


def simulate(
    recipe: Recipe,
    overrides: Overrides = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", help="Training steps.", show_default="the plan's, or some"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seeds the responses' lengths.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the figures for other programs.")] = False,
) -> None:
    """Run the plan on a virtual clock and print speed, idle devices and staleness; no device is needed."""
    found = launch.simulate(recipe, overrides or [], steps, seed)
    if json:
        print_text(dumps(found.document(), indent=2))
    else:
        show(render_simulation(found))


def _at_most_one(options: Mapping[str, bool]) -> str | None:
    """The option that is given, of those that print."""
    given = [option for option, is_given in options.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} both print; take one of them")
    return given[0] if given else None


def _show_plan(compiled: launch.Compiled, chosen: str | None, html: Path | None) -> None:
    """Print one plan as chosen, and write its page where asked."""
    if html is not None:
        _write_page(compiled, html)
    if chosen is not None:
        print_text(PRINTED[chosen](compiled))
    elif html is not None:
        print_text(f"{html}: the page of plan {compiled.plan.digest[:12]}")
    else:
        show(render_plan(compiled.plan))


def _write_page(compiled: launch.Compiled, file: Path) -> None:
    from hflow.report.page import render_page

    page = render_page(compiled.plan)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {file}: it cannot be written: {error.strerror or error}") from error


def _compare(before: str, after: str, third: str | None, overrides: list[str], *, as_json: bool) -> None:
    """Print what changed between two plans; exit code 1 where something did."""
    if third is not None:
        raise ConfigError(f"--diff compares two plans, {before} and {after}; leave out {third}")
    diff = launch.compare_plans(before, after, overrides)
    if as_json:
        print_text(dumps(diff.to_json(), indent=2))
    else:
        show(render_diff(diff, before, after))
    if diff.changes:
        raise typer.Exit(DIFFERENT)
