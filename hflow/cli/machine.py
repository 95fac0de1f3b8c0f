"""hflow doctor and hflow profile: what this machine has, and how fast it is."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from hflow import launch
from hflow.base.terminal import print_text, show
from hflow.base.text import format_share

if TYPE_CHECKING:
    from hflow.doctor.finding import Finding


def doctor(
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            metavar="N",
            min=0,
            help="Also check this many GPUs and try small runs on them, for some minutes; 0 tries CPUs.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the results here.")
    ] = None,
) -> None:
    """Show what this machine can run, and how to install or fix the rest."""
    from hflow.doctor import check_machine

    findings = list(check_machine())
    show(_table(findings))
    for finding in [] if gpus is None else _check_gpus(gpus):
        findings.append(finding)
        show(_table([finding]))  # a line as soon as it is known
    if json_file is not None:
        rows = [dataclasses.asdict(finding) for finding in findings]
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if any(finding.required and not finding.ok for finding in findings):
        raise typer.Exit(1)


def _check_gpus(num_gpus: int) -> Iterator[Finding]:
    """Check GPUs, then try runs on them; without the GPUs that were asked for, nothing is tried."""
    from hflow.base.machine_gpus import visible_gpus
    from hflow.doctor.collectives import check_collectives
    from hflow.doctor.finding import Finding
    from hflow.doctor.gpus import (
        check_attention,
        check_decoding,
        check_gpus,
        check_layer_times,
        check_layers,
        check_logprobs,
        check_sockets,
        in_child,
    )
    from hflow.doctor.trial_runs import trial_device, try_runs

    memory_gib = None
    if num_gpus > 0:
        gpus, is_usable = visible_gpus(os.environ), True
        for finding in check_gpus(gpus, num_gpus):
            is_usable &= finding.ok or not finding.required
            yield finding
        if not is_usable:
            detail = "no run was tried, as the lines above must be fixed first"
            yield Finding("trial", "all", False, detail, "hflow doctor --gpus 0 tries CPUs", required=False)
            return
        memory_gib = min(gpu.memory_gib for gpu in gpus[:num_gpus])
    device = "cuda" if num_gpus else "cpu"
    yield from in_child(check_attention, device)
    yield from in_child(check_logprobs, device)
    if num_gpus:
        yield from in_child(check_decoding, device)
        yield from in_child(check_layers, device)
        yield from in_child(check_sockets, device)
    yield from check_layer_times(device)
    yield from check_collectives(num_gpus)
    yield from try_runs(num_gpus, memory_gib, trial_device() if num_gpus else None)


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        mark = Text("ok", "green") if finding.ok else Text("no", "red" if finding.required else "yellow")
        fix = "" if finding.ok else finding.fix
        table.add_row(finding.topic, finding.name, mark, Text(finding.detail), Text(fix, "dim"))
    return table


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
    found = launch.measure_hardware(device, out, lambda line: typer.echo(f"measuring {line}", err=True))
    for part, error in found.calibration.missed.items():
        print_text(f"{part}: misses what it was not fitted to by {format_share(error)}")
    print_text(f"shipped figures for: {', '.join(found.calibration.unmeasured)}")
    print_text(f"{found.file}: use it with calibration={found.file}")
