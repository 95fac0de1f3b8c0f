"""Writes every step's metrics to `metrics.jsonl` and to TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tensorboardX import SummaryWriter

from hflow.metrics import Metric, find_metric

MAX_ROW_BYTES = 1 << 24


class MetricsLog:
    """Appends one JSON object per row, flushed at once, so that a killed run keeps what it measured.

    A resumed run appends to the same file. Where a step has two rows, the later one counts.

    Args:
        path: `metrics.jsonl`.
        tensorboard: directory of TensorBoard event files.
        metrics: declarations; those that are histograms are logged as such in TensorBoard.
    """

    def __init__(self, path: Path, tensorboard: Path, metrics: Iterable[Metric] = ()) -> None:
        _drop_partial_row(path)
        self._file = path.open("a", encoding="utf-8")
        self._writer = SummaryWriter(logdir=str(tensorboard))
        self._histograms = [metric for metric in metrics if metric.is_histogram]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step.

        In the JSON, a value that is not finite is null, and each bin of a histogram is a value. In
        TensorBoard the bins are one histogram.
        """
        row = {"step": step, **{name: _json_number(value) for name, value in values.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        histograms: dict[Metric, dict[int, float]] = defaultdict(dict)
        for name, value in values.items():
            if metric := find_metric(name, self._histograms):
                histograms[metric][int(metric.key_of(name) or 0)] = value
            else:
                self._writer.add_scalar(name, value, step)
        for metric, shares in histograms.items():
            self._add_histogram(metric.member("histogram"), shares, step)
        self._writer.flush()

    def write_text(self, step: int, name: str, text: str) -> None:
        """Log a text of a step, in Markdown, in TensorBoard only."""
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._writer.close()

    def _add_histogram(self, name: str, shares: Mapping[int, float], step: int) -> None:
        """Write one bin for each whole number from the smallest to the largest, centred on it."""
        bins = range(min(shares), max(shares) + 1)
        self._writer.add_histogram_raw(
            name,
            min=bins[0] - 0.5,
            max=bins[-1] + 0.5,
            num=sum(shares.values()),
            sum=sum(value * share for value, share in shares.items()),
            sum_squares=sum(value * value * share for value, share in shares.items()),
            bucket_limits=[value + 0.5 for value in bins],
            bucket_counts=[shares.get(value, 0.0) for value in bins],
            global_step=step,
        )


def _drop_partial_row(path: Path) -> None:
    """Remove the last row if a process ended while it wrote it."""
    if path.is_file():
        with path.open("rb+") as file:
            start = max(0, file.seek(0, os.SEEK_END) - MAX_ROW_BYTES)
            file.seek(start)
            file.truncate(start + file.read().rfind(b"\n") + 1)


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
