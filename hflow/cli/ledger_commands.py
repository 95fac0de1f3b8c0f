"""`hflow why` and `hflow samples`: what became of the samples of a run."""

from __future__ import annotations

from json import dumps
from typing import Annotated

import typer

from hflow import launch
from hflow.errors import ConfigError
from hflow.report.sample_history_text import render_story
from hflow.report.samples_text import as_csv, render_samples
from hflow.terminal import print_text, show

LIMIT = 20
"""Rows of a table, where nothing else is asked for."""

Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's directory, or NAME for the latest in runs/NAME.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def why(
    run: Run,
    sample: Annotated[
        str,
        typer.Argument(metavar="SAMPLE", help="ID in the trained stream, or STREAM/ID.", show_default=False),
    ],
    json: AsJson = False,
) -> None:
    """Tell the life of one sample: who made it with which weights, and what became of it, and why."""
    story = launch.why(run, sample)
    if json:
        print_text(dumps(story.to_json(), indent=2))
    else:
        show(render_story(story))


def samples(
    run: Run,
    where: Annotated[
        str | None,
        typer.Option(
            "--where", metavar="SQL", help="Which samples, by the columns below.", show_default=False
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=0, help="Rows at most.", show_default=f"{LIMIT} in a table"),
    ] = None,
    json: AsJson = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    count: Annotated[bool, typer.Option("--count", help="Print how many there are.")] = False,
) -> None:
    """List the samples of a run, one row each, that an SQL condition holds for; nothing is changed."""
    if json + csv + count > 1:
        raise ConfigError("--json, --csv and --count each print something else; take one of them")
    if count:
        print_text(str(launch.count_samples(run, where)))
        return
    found = launch.samples(run, where, limit if json or csv or limit is not None else LIMIT)
    if json:
        print_text(dumps(found.to_json(), indent=2))
    elif csv:
        print_text(as_csv(tuple(launch.SAMPLE_COLUMNS), found.rows))
    else:
        show(render_samples(found.to_json(), found.total))
