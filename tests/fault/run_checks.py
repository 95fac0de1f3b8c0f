"""What must hold for a run that was disturbed and then completed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from hflow.runtime.ledger import audit
from hflow.runtime.ledger.query import count
from hflow.runtime.saving.checkpoint import verify_checkpoint
from hflow.runtime.saving.run_directory import read_metrics

OF_THE_RUN = (
    "time/",
    "busy/",
    "tokens_per_second",
    "samples_per_second",
    "rollout/",
    "seconds/",
    "memory",
    "/mfu",
    "/retries",
)
"""Parts of the names of metrics that measure time, or count what faults cause."""
STEP = "time/step_seconds"
"""Every completed step has it."""


def problems_of(
    directory: Path,
    steps: int,
    num_trained: int,
    *,
    exactly: bool,
    models: Sequence[str],
    same_as: Path | None,
) -> list[str]:
    """Return what is wrong with a completed run; empty if nothing is.

    Args:
        directory: of the run.
        steps: that the run has.
        num_trained: samples that these steps train.
        exactly: whether they train exactly so many; otherwise fewer are right, as groups may lose samples.
        models: the trained models.
        same_as: directory of the undisturbed run with the same weights and metrics; None: they may differ.
    """
    problems = [f"audit: {violation}" for violation in audit(directory / "ledger.sqlite")]
    trained = count(directory / "ledger.sqlite", "\"end\" = 'trained'")
    if trained > num_trained or (exactly and trained != num_trained):
        problems.append(f"{trained} samples were trained, not {num_trained}")
    rows = metrics_of(directory)
    if missing := sorted(set(range(1, steps + 1)) - {step for step, row in rows.items() if STEP in row}):
        problems.append(f"metrics.jsonl has no row of the steps {missing}")
    if verify_checkpoint(directory / "checkpoints" / "latest") != steps:
        problems.append("the last checkpoint is not that of the last step")
    # A run may be killed while it replaces its trace or its summary, which is the last that it does.
    last = (".trace.json", ".summary.json")
    hidden = [path.name for path in directory.rglob(".*") if path.name not in last]
    hidden += [name for name in ("weights", "sample_log") if (directory / name).exists()]
    if hidden:
        problems.append(f"unfinished files are left: {hidden}")
    if same_as is not None:
        problems += _differences(directory, rows, same_as, models)
    return problems


def metrics_of(directory: Path) -> dict[int, dict[str, Any]]:
    """Return step -> its metrics; of several rows of a step, the later ones count."""
    rows: dict[int, dict[str, Any]] = {}
    for row in read_metrics(directory / "metrics.jsonl"):
        step = int(row["step"] or 0)
        rows[step] = rows.get(step, {}) | row
    return rows


def without_timing(rows: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return metrics without those that faults may change."""
    return {
        step: {name: value for name, value in row.items() if not any(part in name for part in OF_THE_RUN)}
        for step, row in rows.items()
    }


def _differences(
    directory: Path, rows: dict[int, dict[str, Any]], same_as: Path, models: Sequence[str]
) -> list[str]:
    problems = []
    for model in models:
        path = Path("checkpoints/latest") / model / "model.safetensors"
        ours, theirs = load_file(directory / path), load_file(same_as / path)
        if ours.keys() != theirs.keys() or any(not ours[key].equal(theirs[key]) for key in theirs):
            problems.append(f"the weights of {model} differ from those of the undisturbed run")
    ours_by_step, theirs_by_step = without_timing(rows), without_timing(metrics_of(same_as))
    for step in sorted(ours_by_step.keys() | theirs_by_step.keys()):
        mine, other = ours_by_step.get(step, {}), theirs_by_step.get(step, {})
        different = sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))
        if different:
            shown = {name: (mine.get(name), other.get(name)) for name in different[:3]}
            problems.append(f"metrics of step {step} differ from the undisturbed run: {json.dumps(shown)}")
    return problems[:6]
