"""The command line: parse, call the launcher, print."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from json import dumps
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hflow import cli_ledger, launch
from hflow.doctor import Finding, examine
from hflow.errors import ConfigError, HflowError
from hflow.report.diff_text import render_diff
from hflow.report.graph_text import render_graph
from hflow.report.plan_drawing import plan_dot, plan_mermaid
from hflow.report.plan_text import render_plan
from hflow.report.simulation_text import render_simulation
from hflow.report.summary import RunSummary
from hflow.report.twin_text import render_twin
from hflow.terminal import print_text as _print
from hflow.terminal import show as _show

DIFFERENT = 1
"""Plans that were compared differ, or a twin."""
USER_ERROR = 2
INTERRUPTED = 130
STOPPED = "stopped"
"""Why a run ended that the user interrupted."""

OVERRIDES = "Configuration: steps=10, models.actor.optim.lr=3e-4, nodes.actor_train.clip=0.1 and so on."
DIFF = (
    "Compare two plans and say what a resume would have to do. Each is a plan file, a run's directory or a "
    "recipe, compiled with the KEY=VALUEs. Exit code 1 where they differ."
)
LOCKED = (
    "Run exactly the plan of a plan file or of a run's directory, or say what no longer fits. RECIPE: where "
    "it lies now."
)

LAYOUT = (
    "Every model in this layout, on megatron-core; may be given several times. Without: all pairs of axes, "
    "and all three."
)

PRINTED: Mapping[str, Callable[[launch.Compiled], str]] = {
    "--json": launch.document,
    "--dot": lambda compiled: plan_dot(compiled.plan),
    "--mermaid": lambda compiled: plan_mermaid(compiled.plan),
}
"""Options that print a plan for other programs."""


def _examples(*commands: str) -> str:
    return "\n\n".join(["Examples:", *(f"[bold]hflow {command}[/bold]" for command in commands)])


class StoppedByUser(Exception):
    """A run ended by Ctrl-C, and its summary is printed."""


app = typer.Typer(
    name="hflow",
    help="Reinforcement learning of language models as a typed dataflow graph: recipe, plan, run.",
    epilog=_examples("check recipes/grpo.py", "plan recipes/grpo.py cluster=h100-8x8", "run recipes/sft.py"),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

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


@app.command(epilog=_examples("check recipes/grpo.py", "check recipes/grpo.py nodes.actor_train.prox=none"))
def check(recipe: Recipe, overrides: Overrides = None) -> None:
    """Read a recipe, bind every parameter, refuse what cannot be right, and print the graph."""
    _show(render_graph(launch.check(recipe, overrides or [])))


@app.command(
    epilog=_examples(
        "plan recipes/grpo.py cluster=h100-2x8 models.actor.layout=d4t2p2",
        "plan recipes/grpo.py --html plan.html",
        "plan recipes/grpo.py --dot | dot -Tsvg > plan.svg",
        "plan recipes/grpo.py steps=20 --json > lock.json",
        "plan --diff runs/grpo/latest recipes/grpo.py steps=20",
    )
)
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
        _compare(*diff, *_split(recipe, overrides or []), as_json=chosen is not None)
    elif recipe is not None:
        _show_plan(launch.compile_recipe(recipe, overrides or []), chosen, html)
    else:
        raise ConfigError("name a recipe, as in `hflow plan recipes/grpo.py`, or two plans with --diff A B")


@app.command(
    epilog=_examples(
        "run recipes/sft.py",
        "run recipes/grpo.py steps=20 workers=inproc",
        "run recipes/grpo.py models.actor.optim.lr=2e-4 --cfg",
        "run --plan lock.json out=elsewhere",
    )
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
        recipe, changes = _split(recipe, overrides or [])
        if cfg:
            _print(launch.compose_locked(plan, changes))
        else:
            _finish(launch.run_plan(plan, recipe, changes, live))
    elif recipe is not None:
        if cfg:
            _print(launch.compose(recipe, overrides or []))
        else:
            _finish(launch.run(recipe, overrides or [], live))
    else:
        raise ConfigError("name a recipe, as in `hflow run recipes/grpo.py`, or a plan with --plan FILE")


@app.command(
    epilog=_examples(
        "simulate recipes/grpo_async.py schedule.max_staleness=4 workload.response_cv=1.2",
        "simulate recipes/grpo.py --steps 200 --json",
    )
)
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
        _print(dumps(found.document(), indent=2))
    else:
        _show(render_simulation(found))


@app.command(
    epilog=_examples(
        "twin recipes/ppo.py batch=32",
        "twin recipes/grpo.py batch=8 --layout d2t2p2",
        "twin recipes/grpo.py batch=8 --as-configured placement='actor=0:d1 actor.gen=1:d1'",
    )
)
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
    _show(render_twin(Path(recipe).stem, steps, found.results, found.notes))
    if not all(result.is_equal for result in found.results):
        raise typer.Exit(DIFFERENT)


app.command(
    epilog=_examples("why runs/grpo/latest 17", "why grpo eval_gen/3 --json"),
)(cli_ledger.why)


app.command(
    epilog="\n\n".join(
        [
            _examples(
                "samples grpo --where \"reason = 'stale' and lag > 2\"",
                "samples grpo --where 'reward > 0.5' --csv",
                'samples runs/grpo/latest --where "\\"end\\" = \'refused\'" --count',
            ),
            "Columns:",
            *(f"[bold]{name}[/bold]: {says}" for name, says in launch.SAMPLE_COLUMNS.items()),
        ]
    ),
)(cli_ledger.samples)


@app.command(epilog=_examples("doctor"))
def doctor() -> None:
    """Say what this machine can run, and the one command that mends what it cannot."""
    findings = list(examine())
    _show(_table(findings))
    if any(finding.required and not finding.ok for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line. A user's error is one line and exit code 2; Ctrl-C is 130."""
    try:
        app()
    except HflowError as error:
        _stop(str(error), USER_ERROR)
    except StoppedByUser:
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            _stop("interrupted", INTERRUPTED)
        raise


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
        _print(PRINTED[chosen](compiled))
    elif html is not None:
        _print(f"{html}: the page of plan {compiled.plan.digest[:12]}")
    else:
        _show(render_plan(compiled.plan))


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
    diff = launch.compare(before, after, overrides)
    if as_json:
        _print(dumps(diff.to_json(), indent=2))
    else:
        _show(render_diff(diff, before, after))
    if diff.changes:
        raise typer.Exit(DIFFERENT)


def _split(recipe: str | None, overrides: list[str]) -> tuple[str | None, list[str]]:
    """A recipe that may be left out, and overrides: `~key` and all that has a `=`."""
    if recipe is not None and ("=" in recipe or recipe.startswith("~")):
        return None, [recipe, *overrides]
    return recipe, overrides


def _finish(summary: RunSummary) -> None:
    """Print how a run ended."""
    _show(summary.render())
    if summary.reason == STOPPED:
        raise StoppedByUser


def _tell(line: str) -> None:
    """Say what goes on, apart from the report."""
    Console(stderr=True).print(Text(line, style="dim"))


def _stop(message: str, code: int) -> NoReturn:
    line = Text.assemble(("error: ", "bold red"), " ".join(message.split()))
    Console(stderr=True).print(line, soft_wrap=True)
    raise SystemExit(code)


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        mark = Text("ok", "green") if finding.ok else Text("no", "red" if finding.required else "yellow")
        remedy = "" if finding.ok else finding.remedy
        table.add_row(finding.topic, finding.name, mark, Text(finding.detail), Text(remedy, "dim"))
    return table
