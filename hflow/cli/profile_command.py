"""`hflow profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hflow import launch
from hflow.report.formatting import share_text
from hflow.terminal import print_text


def profile(
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="Its name in configs/hardware/devices.",
            show_default="the first CUDA device, or else cpu",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to write.", show_default="NAME.yaml"),
    ] = None,
) -> None:
    """Measure this machine, for plans with calibration=FILE: kernels, memory, collectives, decode steps."""
    found = launch.profile(device, out, lambda line: typer.echo(f"measuring {line}", err=True))
    for part, error in found.calibration.missed.items():
        print_text(f"{part}: misses what it was not fitted to by {share_text(error)}")
    print_text(f"shipped figures for: {', '.join(found.calibration.unmeasured)}")
    print_text(f"{found.file}: use it with calibration={found.file}")
