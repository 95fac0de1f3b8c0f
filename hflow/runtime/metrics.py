"""Writes every step's metrics to `metrics.jsonl` and to TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter


class MetricsLog:
    """One JSON object a row, flushed at once, so that a killed run keeps what it measured.

    A resumed run appends: where a step stands twice, the later row counts.
    """

    def __init__(self, path: Path, tensorboard: Path) -> None:
        """Open the file and the TensorBoard directory, keeping what they hold.

        Args:
            path: `metrics.jsonl`.
            tensorboard: directory of TensorBoard event files.
        """
        self._file = path.open("a", encoding="utf-8")
        self._writer = SummaryWriter(logdir=str(tensorboard))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log values of a step. What is not finite is null in the JSON, and as it is in TensorBoard."""
        row = {"step": step, **{name: _json_number(value) for name, value in values.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """Read the rows of a `metrics.jsonl` in the order written."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
