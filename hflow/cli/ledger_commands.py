"""`hflow why` and `hflow samples`: query the ledger of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from hflow import launch
from hflow.errors import ConfigError
from hflow.report.ledger_text import as_csv, render_samples, render_story
from hflow.report.sample_text import render_samples_with_text, render_texts
from hflow.terminal import print_data, print_json, print_text, show

LIMIT = 20
"""Default number of rows of a table."""

Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's directory, or NAME for the newest run in runs/NAME.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def why(
    run: Run,
    sample: Annotated[
        str,
        typer.Argument(
            metavar="SAMPLE", help="Its id in the trained stream, or STREAM/ID.", show_default=False
        ),
    ],
    json: AsJson = False,
) -> None:
    """Show the history of one sample: which weights generated it, its reward, and whether it was trained."""
    history = launch.why(run, sample)
    texts = launch.why_texts(run, history)
    if json:
        by_stream = {text["stream"]: text["turns"] for text in texts}
        print_json({**history.to_json(), "texts": by_stream})
    else:
        show(render_story(history))
        show(render_texts(texts))


def samples(
    run: Run,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            help="SQL condition on the columns below. Default: all samples.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=0, help="Maximum number of rows.", show_default=f"{LIMIT} in a table"
        ),
    ] = None,
    json: AsJson = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print all columns as CSV.")] = False,
    count: Annotated[bool, typer.Option("--count", help="Print only the number of samples.")] = False,
    text: Annotated[
        bool,
        typer.Option("--text", help="Print prompts and completions, of samples whose text was kept."),
    ] = False,
) -> None:
    """List the samples of a run, or those that meet an SQL condition."""
    if json + csv + count > 1:
        raise ConfigError("--json, --csv and --count exclude each other; use one of them")
    if text and (csv or count):
        raise ConfigError(f"--text prints text or --json; remove {'--csv' if csv else '--count'}")
    if text:
        found = launch.samples_with_text(run, where, limit if json or limit is not None else LIMIT)
        if json:
            print_json(found.to_json())
        else:
            show(
                render_samples_with_text(
                    found.samples.to_json(), found.texts, found.samples.total, found.total
                )
            )
        return
    if count:
        print_text(str(launch.count_samples(run, where)))
        return
    result = launch.samples(run, where, limit if json or csv or limit is not None else LIMIT)
    if json:
        print_json(result.to_json())
    elif csv:
        print_data(as_csv(tuple(launch.SAMPLE_COLUMNS), result.rows))
    else:
        show(render_samples(result.to_json(), result.total))
