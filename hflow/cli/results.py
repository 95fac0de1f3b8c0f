"""`hflow report`, `watch`, `compare`, `eval` and `export`: what can be done with the results of runs.

`hflow why` and `hflow samples`: query the ledger of a run.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from hflow import launch
from hflow.base.errors import ConfigError
from hflow.base.terminal import print_data, print_json, print_text, show
from hflow.base.text import format_bytes
from hflow.cli.arguments import (
    AsJson,
    Html,
    Live,
    ModelOfRun,
    Overrides,
    Port,
    StoppedByUser,
    optional_recipe_file,
    write_html,
)

TARGET = "A run's directory, NAME for the newest run in runs/NAME, or the directory of a checkpoint."
METRIC = "A metric, or a glob such as 'time/*'. May be repeated."


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's directory, or NAME for the newest run in runs/NAME.", show_default=False
    ),
]


def report(
    run: Run,
    html: Html = None,
) -> None:
    """Show what a run measured, generated, refused and suffered. It may still be going."""
    found = launch.read_report(run)
    if html is None:
        from hflow.report.text.results import render_run_report

        show(render_run_report(found))
        return
    from hflow.report.html.run import render_run_page

    write_html(html, render_run_page(found))
    print_text(f"{html}: page of {found.record.name}, {found.record.state}")


def watch(
    run: Run,
    port: Port = 8100,
) -> None:
    """Serve a page that follows a run, on this machine only, until Ctrl-C. The run may have ended."""
    try:
        launch.watch(run, port, _print_watched)
    except KeyboardInterrupt:
        raise StoppedByUser from None


def _print_watched(watched: launch.WatchedRun) -> None:
    print_text(watched.run)
    print_text(f"{watched.url} follows it; Ctrl-C ends this command, not the run")
    if watched.tunnel is not None:
        print_text(f"on your own machine: {watched.tunnel}")


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
    json: AsJson = False,
    html: Html = None,
) -> None:
    """Compare runs: how they were configured differently, and what their metrics reached.

    Runs that differ only in their seed are one column, with mean and standard deviation.
    """
    from hflow.report.text.compare import names_text, render_comparison

    comparison = launch.compare(runs, metric or ())
    if html is not None:
        from hflow.report.html.run import render_compare_page

        write_html(html, render_compare_page(comparison))
    if json:
        print_json(comparison.to_json())
    elif html is not None:
        print_text(f"{html}: page of {names_text(comparison)}")
    else:
        show(render_comparison(comparison))


def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT", help=TARGET, show_default=False)],
    overrides: Overrides = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="The recipe that scores samples.",
            callback=optional_recipe_file,
            show_default="the run's",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="The model of RECIPE that a checkpoint is for."),
    ] = None,
    stream: Annotated[
        list[str] | None,
        typer.Option(
            "--stream",
            metavar="NAME",
            help="A stream to evaluate. May be repeated.",
            show_default="those that are not trained, or else all",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", min=1, help="Also draw N samples of every prompt."),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0.0, help="Temperature of these samples.")
    ] = 1.0,
    pass_at: Annotated[
        list[int] | None,
        typer.Option(
            "--pass-at", metavar="K", help="Estimate pass@K. May be repeated.", show_default="1, 2, 4 ... N"
        ),
    ] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", metavar="X", help="Lowest score of a correct sample.")
    ] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    live: Live = None,
) -> None:
    """Score a checkpoint on whole datasets, with the nodes of its recipe, and estimate pass@k."""
    options = launch.EvaluationOptions(
        recipe, model, tuple(stream or ()), samples, temperature, tuple(pass_at or ()), threshold
    )
    report = launch.evaluate(target, overrides or [], options, live, is_quiet=json)
    if json:
        print_json(report.to_json())
    else:
        from hflow.report.text.results import render_evaluation

        show(render_evaluation(report))


def export(
    target: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT", help=TARGET, show_default=False)],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory that does not exist yet.", show_default=False)
    ],
    model: ModelOfRun = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option("--dtype", help="Precision of the weights.", show_default="that of the checkpoint"),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="OWNER/NAME",
            help="Also upload it as a model of the Hugging Face Hub, private if it is new.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a saved model as plain Hugging Face files, with tokenizer and chat template."""
    done = launch.export(target, directory, model, dtype, push)
    template = "with" if done.has_chat_template else "without"
    print_text(f"{done.model}: {done.source}")
    print_text(f"{done.directory}: {format_bytes(done.num_bytes)}, {done.dtype}, {template} a chat template")
    if done.page is not None:
        print_text(f"{done.page}")


LIMIT = 20
"""Default number of rows of a table."""


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
    from hflow.report.text.ledger import render_output, render_story
    from hflow.report.text.samples import render_texts

    history = launch.why(run, sample)
    texts, output = launch.why_texts(run, history), launch.why_output(run, history)
    if json:
        by_stream = {text["stream"]: text["turns"] for text in texts}
        lines = [asdict(line) for line in output]
        print_json({**history.to_json(), "texts": by_stream, "output": lines})
    else:
        show(render_story(history))
        show(render_output(output))
        show(render_texts(texts))


class SamplesCommand(TyperCommand):
    """`hflow samples`: its help lists the columns, which nothing else needs."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help with the columns."""
        columns = [f"[bold]{name}[/bold]: {text}" for name, text in launch.SAMPLE_COLUMNS.items()]
        self.epilog = "\n\n".join([self.epilog or "", "Columns:", *columns])
        super().format_help(ctx, formatter)


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
    from hflow.report.text.ledger import as_csv, render_samples
    from hflow.report.text.samples import render_samples_with_text

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
                    found.samples.to_json(),
                    found.texts,
                    found.samples.total,
                    found.total,
                    is_exact=found.samples.is_exact,
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
        show(render_samples(result.to_json(), result.total, is_exact=result.is_exact))
