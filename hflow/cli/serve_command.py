"""`hflow serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hflow import launch
from hflow.cli.exit_codes import StoppedByUser
from hflow.standard_streams import outlive_reader
from hflow.terminal import print_note, print_text

if TYPE_CHECKING:
    from hflow.launch.serve_checkpoint import ServedEndpoint

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
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="The model of a run.", show_default="its only one"),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="ENGINE", help=ENGINE, show_default="vllm on CUDA, else embedded"),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port; 0 for a free one.")
    ] = 8000,
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
