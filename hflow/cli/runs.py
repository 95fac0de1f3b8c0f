"""`hflow run` and `twin`: the commands that start workers.

`hflow serve`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hflow import launch
from hflow.base.errors import ConfigError
from hflow.base.standard_streams import outlive_reader
from hflow.base.terminal import print_data, print_note, print_text, show
from hflow.cli.arguments import (
    DIFFERENT,
    Live,
    ModelOfRun,
    OptionalRecipe,
    Overrides,
    Port,
    Recipe,
    RunStopped,
    StoppedByUser,
    recipe_name,
    split_recipe,
)

if TYPE_CHECKING:
    from hflow.launch.checkpoints.serve import ServedEndpoint


STOPPED = "stopped"
"""Reason in the summary of a run that Ctrl-C stopped."""
PLAN = (
    "Run exactly the plan in a plan file or a run's directory. It is an error if the recipe's plan has "
    "changed. Name RECIPE only if its file has moved."
)
RESUME = (
    "Continue a run from its last checkpoint: the run's directory, NAME for the latest run in runs/NAME, or "
    "the directory of a checkpoint. Overrides such as steps=500 change its configuration."
)
LAYOUT = (
    "Layout to compare, such as d2t2p1, for all models on the megatron backend. Repeat the option for "
    "several. Default: all pairs of axes, and all three axes."
)


def run(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    plan: Annotated[str | None, typer.Option("--plan", metavar="FILE", help=PLAN, show_default=False)] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help=RESUME, show_default=False)
    ] = None,
    cfg: Annotated[
        bool, typer.Option("--cfg", help="Print the whole configuration instead of running.")
    ] = False,
    live: Live = None,
) -> None:
    """Run a recipe. Results are in OUT/NAME/TIME; OUT/NAME/latest is the newest run."""
    outlive_reader("stdout")
    recipe, changes = split_recipe(recipe, overrides or [])
    if resume is not None:
        if plan is not None or cfg:
            raise ConfigError("--resume continues the plan of the run; remove --plan and --cfg")
        if recipe is not None:
            raise ConfigError(
                f"--resume continues {resume} with the recipe that it has; remove the recipe "
                f"{recipe_name(recipe)}"
            )
        _show_start(f"reading {resume}")
        _finish(launch.resume(resume, changes, live))
    elif plan is not None:
        if cfg:
            print_data(launch.compose_plan_file(plan, changes))
        else:
            _show_start(f"reading {plan}")
            _finish(launch.run_plan(plan, recipe, changes, live))
    elif recipe is not None:
        if cfg:
            print_data(launch.compose_recipe(recipe, changes))
        else:
            _show_start(f"planning {recipe}")
            _finish(launch.run(recipe, changes, live))
    else:
        raise ConfigError("name a recipe, as in `hflow run grpo`, or a plan with --plan FILE")


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
    """Check that a recipe computes the same losses, gradients and weights in one process and on many ranks.

    The exit code is 1 if anything differs.
    """
    if as_configured and layout:
        raise ConfigError("--as-configured uses the configuration's layouts; remove --layout")
    layouts = None if as_configured else layout or []
    report = launch.twin(recipe, overrides or [], layouts, steps, print_note)
    from hflow.report.text.twin import render_twin

    show(render_twin(Path(recipe).stem, steps, report.results, report.notes))
    if not all(result.is_equal for result in report.results):
        raise typer.Exit(DIFFERENT)


def _finish(summary: launch.RunSummary) -> None:
    from hflow.report.text.summary import render_summary

    show(render_summary(summary))
    if summary.reason == STOPPED:
        print_text(f"to continue: hflow run --resume {summary.directory}")
        raise RunStopped


def _show_start(line: str) -> None:
    """Tell a person at a terminal at once what takes the first seconds."""
    if sys.stderr.isatty():
        print_note(line)


KEYS = "Keys of the model's configuration to change, such as gen.max_model_len=4096 or dtype=bf16."
ENGINE = "embedded, or vllm, which starts vLLM's own server."


def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|RUN",
            help="A checkpoint directory, a run's directory, or NAME for the newest run in runs/NAME.",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help=KEYS, show_default=False)
    ] = None,
    model: ModelOfRun = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="ENGINE", help=ENGINE, show_default="vllm on CUDA, else embedded"),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Port = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="HFLOW_API_KEY",
            help="Key that requests need. Other users of the machine see arguments, but not variables.",
            show_default="none",
        ),
    ] = None,
) -> None:
    """Serve a checkpoint with OpenAI's API, until Ctrl-C."""
    outlive_reader("stdout")
    is_interrupted = launch.serve(
        target,
        overrides or [],
        model=model,
        engine=engine,
        host=host,
        port=port,
        api_key=api_key,
        report_progress=print_note,
        on_ready=_print_endpoint,
    )
    if is_interrupted:
        raise StoppedByUser


def _print_endpoint(endpoint: ServedEndpoint) -> None:
    print_text(f"{endpoint.model} at {endpoint.url} (engine {endpoint.engine}: {endpoint.why})")
    print_text(endpoint.example)
