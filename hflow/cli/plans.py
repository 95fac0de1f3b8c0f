"""`hflow check`, `plan`, `size` and `simulate`: the commands that need no device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hflow import launch
from hflow.base.errors import ConfigError, PlanError
from hflow.base.terminal import print_data, print_json, print_text, show
from hflow.cli.arguments import (
    DIFFERENT,
    AsJson,
    Html,
    OptionalRecipe,
    Overrides,
    Recipe,
    split_recipe,
    write_html,
)

if TYPE_CHECKING:
    from hflow.report.tables import TableView


DIFF = (
    "Compare plan A with plan B, and print what resuming a checkpoint of A under B would change. Each is a "
    "plan file, a run's directory, or a recipe, to which the KEY=VALUEs apply. The exit code is 1 if they "
    "differ."
)
EXPLAIN = (
    "Print what the seconds of a node consist of, such as actor_gen, or of an engine's new weights, such as "
    "actor@gen: device, host and network, and the calibration's figures that decide them."
)
WHAT_IF = (
    "Plan again with each of these changes, and print seconds, memory and cost beside the base. Several "
    "KEY=VALUEs in one quotation are one change."
)


class PlanCommand(TyperCommand):
    """`hflow plan`: every argument after `--what-if`, up to the next option, is a change."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give each change an option of its own, as click understands them."""
        spread, is_change = [], False
        for arg in args:
            if arg.startswith("-"):
                is_change = arg == "--what-if"
                spread += [] if is_change else [arg]
            else:
                spread += ["--what-if", arg] if is_change else [arg]
        if args and args[-1] == "--what-if":
            raise ConfigError("--what-if needs a change, such as schedule.max_staleness=4")
        return super().parse_args(ctx, spread)


def check(recipe: Recipe, overrides: Overrides = None) -> None:
    """Check a recipe: find what makes each input of each node, report errors, and print the graph."""
    from hflow.report.text.graph import render_graph

    show(render_graph(launch.check(recipe, overrides or [])))


def plan(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print a plan file, for `run --plan`; with --diff, the changes as JSON."),
    ] = False,
    dot: Annotated[bool, typer.Option("--dot", help="Print the graph for Graphviz.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print the graph for Mermaid.")] = False,
    html: Html = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="NODE", help=EXPLAIN, show_default=False)
    ] = None,
    diff: Annotated[
        tuple[str, str] | None, typer.Option("--diff", metavar="A B", help=DIFF, show_default=False)
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", metavar="'KEY=VALUE' ...", help=WHAT_IF, show_default=False),
    ] = None,
) -> None:
    """Plan a recipe on a cluster: devices, order, data transfers, memory and time. Needs no device."""
    recipe, changes = split_recipe(recipe, overrides or [])
    chosen = _at_most_one({"--json": json, "--dot": dot, "--mermaid": mermaid})
    if explain is not None:
        if recipe is None or chosen or html is not None or diff is not None or what_if:
            raise ConfigError("--explain prints the parts of one node of a recipe; remove other options")
        from hflow.report.text.explanation import render_explanation

        show(render_explanation(launch.explain(launch.compile_recipe(recipe, changes), explain)))
        return
    if diff is not None and what_if:
        raise ConfigError("--diff and --what-if exclude each other; use one of them")
    if diff is not None:
        if html is not None or chosen not in (None, "--json"):
            raise ConfigError(f"--diff prints text or --json; remove {'--html' if html else chosen}")
        _compare_plans(*diff, recipe, changes, as_json=chosen is not None)
    elif what_if:
        if html is not None or chosen not in (None, "--json"):
            raise ConfigError(f"--what-if prints text or --json; remove {'--html' if html else chosen}")
        if recipe is None:
            raise ConfigError("name a recipe, as in `hflow plan grpo --what-if batch=128`")
        found = launch.what_if(recipe, changes, what_if)
        if chosen is None:
            from hflow.report.text.figures import render_what_if

            show(render_what_if(found))
        else:
            print_json(found.to_json())
    elif recipe is not None:
        compiled = launch.compile_recipe(recipe, changes, with_limits=chosen in (None, "--json"))
        _show_plan(compiled, chosen, html)
    else:
        raise ConfigError("name a recipe, as in `hflow plan grpo`, or two plans with --diff A B")


def simulate(
    recipe: Recipe,
    overrides: Overrides = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            help="Training steps to simulate.",
            show_default="as many as show a steady speed",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seed of the response lengths.")] = 0,
    json: AsJson = False,
) -> None:
    """Simulate a run on a virtual clock: speed, idle devices and staleness. Needs no device."""
    simulation = launch.simulate(recipe, overrides or [], steps, seed)
    if json:
        print_json(simulation.to_json())
    else:
        from hflow.report.text.simulation import render_simulation

        show(render_simulation(simulation))


def _at_most_one(options: dict[str, bool]) -> str | None:
    given = [option for option, is_given in options.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other; use one of them")
    return given[0] if given else None


def _show_plan(compiled: launch.Compiled, chosen: str | None, html: Path | None) -> None:
    """Print a plan in the chosen format, and write its HTML page if requested."""
    from hflow.report.text.graph import plan_dot, plan_mermaid
    from hflow.report.text.plan import render_plan

    if html is not None:
        write_page(compiled, html)
    if chosen == "--json":
        print_data(launch.plan_file_text(compiled))
    elif chosen is not None:
        print_data((plan_dot if chosen == "--dot" else plan_mermaid)(compiled.plan))
    elif html is not None:
        print_text(f"{html}: page of plan {compiled.plan.digest[:12]}")
    else:
        show(render_plan(compiled.plan))


def write_page(compiled: launch.Compiled, file: Path, sizes: TableView | None = None) -> None:
    """Write the HTML page of a plan, with the clusters that it was compared with.

    Raises:
        ConfigError: if the file cannot be written.
    """
    from hflow.report.html.plan import render_page

    write_html(file, render_page(compiled.plan, sizes))


def _compare_plans(
    before: str, after: str, recipe: str | None, overrides: list[str], *, as_json: bool
) -> None:
    """Print the changes between two plans; exit with 1 if there are any."""
    if recipe is not None:
        raise ConfigError(f"--diff compares two plans, {before} and {after}; remove {recipe}")
    diff = launch.compare_plans(before, after, overrides)
    if as_json:
        print_json(diff.to_json())
    else:
        from hflow.report.text.diff import render_diff

        show(render_diff(diff, before, after))
    if diff.changes:
        raise typer.Exit(DIFFERENT)


_DEVICES_HELP = (
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
        typer.Option(
            "--on", metavar="CLUSTER", help=_DEVICES_HELP, show_default="the configured cluster's device"
        ),
    ] = None,
    most: Annotated[int, typer.Option("--most", metavar="N", min=1, help="Devices to try at most.")] = 1024,
    cheapest: Annotated[
        bool, typer.Option("--cheapest", help="Choose the lowest cost of the run, not the fewest devices.")
    ] = False,
    json: AsJson = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the page of the chosen plan, with the sizes."),
    ] = None,
) -> None:
    """Find the smallest or the cheapest cluster on which a recipe reaches a target. Needs no device."""
    target = launch.Target(seconds, samples, days)
    from hflow.report.text.figures import render_sizes, size_table

    found = launch.size(recipe, overrides or [], target, on=on or (), most=most, cheapest=cheapest)
    if html is not None and found.compiled is not None:
        write_page(found.compiled, html, size_table(found))
    if json:
        print_json(found.to_json())
    else:
        show(render_sizes(found))
    if found.problem is not None:
        raise PlanError(found.problem)
