"""`hflow compare`: what can be done with the results of runs."""

from __future__ import annotations

from json import dumps
from typing import Annotated

import typer

from hflow import launch
from hflow.report.compare_text import render_comparison
from hflow.terminal import print_text, show

METRIC = "A metric, or a glob such as 'time/*'. May be repeated."


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Directories of runs, or NAME for the newest run in runs/NAME.",
            show_default=False,
        ),
    ],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", metavar="NAME", help=METRIC, show_default="scores, losses, speed, staleness"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare runs: how they were configured differently, and what their metrics reached.

    Runs that differ only in their seed are one column, with mean and standard deviation.
    """
    comparison = launch.compare_runs(runs, metric or ())
    if json:
        print_text(dumps(comparison.to_json(), indent=2))
    else:
        show(render_comparison(comparison))
