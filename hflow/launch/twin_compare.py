"""Holds what two runs left in their directories against each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hflow.report.summary import RunSummary
from hflow.report.twin_text import MetricPair, TwinResult, WeightPair
from hflow.runtime.metrics import read_metrics

COMPARED = ("loss", "grad_norm")
"""What of a train node's metrics must be equal; others, such as clipped fractions, count events."""


def compare(reference: RunSummary, twin: RunSummary, layout: str) -> TwinResult:
    """Losses and gradient norms of every step, and the weights after the last one.

    Args:
        reference: one process, which saved every step.
        twin: the divided run.
        layout: its name.
    """
    return TwinResult(layout, tuple(_metrics(reference, twin)), tuple(_weights(reference, twin)))


def _metrics(reference: RunSummary, twin: RunSummary) -> Iterator[MetricPair]:
    ours, theirs = _compared(reference), _compared(twin)
    nan = float("nan")
    for name in sorted({name for name, _ in [*ours, *theirs]}):
        scale = max((abs(value) for (named, _), value in ours.items() if named == name), default=0.0)
        for step in sorted({at for named, at in [*ours, *theirs] if named == name}):
            key = name, step
            yield MetricPair(name, step, ours.get(key, nan), theirs.get(key, nan), scale)


def _compared(summary: RunSummary) -> dict[tuple[str, int], float]:
    found = {}
    for row in read_metrics(summary.directory / "metrics.jsonl"):
        for name, value in row.items():
            if name.rpartition("/")[2] in COMPARED:
                found[name, int(row["step"] or 0)] = float("nan") if value is None else value
    return found


def _weights(reference: RunSummary, twin: RunSummary) -> Iterator[WeightPair]:
    first, last = (reference.directory / "checkpoints" / name for name in ("step-1", "latest"))
    for model in sorted(path.name for path in last.iterdir()):
        other = twin.directory / "checkpoints" / "latest" / model
        difference, moved = _distance(last / model, other), _distance(last / model, first / model)
        yield WeightPair(model, difference / moved if moved else float(difference > 0))


def _distance(a: Path, b: Path) -> float:
    """2-norm of the difference of two checkpoints; infinite where they hold other tensors."""
    ours, theirs = dict(_files(a)), dict(_files(b))
    if ours.keys() != theirs.keys():
        return float("inf")
    differences = (_read(ours[name], name) - _read(theirs[name], name) for name in ours)
    return math.sqrt(sum(float(difference.square().sum()) for difference in differences))


def _files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Every tensor of a checkpoint, and the file that holds it."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            yield from ((name, file) for name in opened.keys())  # noqa: SIM118 - no mapping


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor.to(torch.float64)
