"""The command line: parse, call the launcher, print."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hflow import launch
from hflow.doctor import Finding, examine
from hflow.errors import HflowError
from hflow.report.graph_text import render_graph
from hflow.report.plan_text import render_plan

USER_ERROR = 2
INTERRUPTED = 130
STOPPED = "stopped"
"""Why a run ended that the user interrupted."""

REPORT_WIDTH = 100
"""Columns of a report that goes to a file or a pipe."""

OVERRIDES = "Configuration: steps=10, models.actor.optim.lr=3e-4, nodes.actor_train.clip=0.1 and so on."


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
        "plan recipes/grpo.py max_staleness=2 --json",
    )
)
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Lay the graph out on a cluster and print where, when and which bytes; no device is needed."""
    made = launch.plan(recipe, overrides or [])
    if json:
        _print(launch.to_json(made))
    else:
        _show(render_plan(made))


@app.command(
    epilog=_examples(
        "run recipes/sft.py",
        "run recipes/grpo.py steps=20 workers=inproc",
        "run recipes/grpo.py models.actor.optim.lr=2e-4 --cfg",
    )
)
def run(
    recipe: Recipe,
    overrides: Overrides = None,
    cfg: Annotated[bool, typer.Option("--cfg", help="Print the configuration and stop.")] = False,
    live: Annotated[
        bool | None,
        typer.Option("--live/--plain", help="A live panel or plain lines.", show_default="by terminal"),
    ] = None,
) -> None:
    """Run a recipe; results lie in OUT/NAME/TIME, and OUT/NAME/latest points there."""
    if cfg:
        _print(launch.compose(recipe, overrides or []).rstrip())
        return
    summary = launch.run(recipe, overrides or [], live)
    _show(summary.render())
    if summary.reason == STOPPED:
        raise StoppedByUser


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


def _print(text: str) -> None:
    """Print as it is, whatever the terminal's width."""
    sys.stdout.write(text + "\n")


def _show(report: RenderableType) -> None:
    """Print for people, as wide as the terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=REPORT_WIDTH)
    console.print(report, crop=False)


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
