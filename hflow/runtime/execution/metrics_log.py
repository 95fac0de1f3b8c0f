"""Writes every step's metrics to `metrics.jsonl` and to TensorBoard."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter

SHARE = re.compile(r"(staleness/\w+)_(\d+)")
"""A bin of a histogram: what it is of, and the lag."""


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
        """Log values of a step. What is not finite is null in the JSON, and as it is in TensorBoard.

        The shares of lags, a value each in the JSON, are histograms in TensorBoard.
        """
        row = {"step": step, **{name: _json_number(value) for name, value in values.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        histograms: dict[str, dict[int, float]] = defaultdict(dict)
        for name, value in values.items():
            if share := SHARE.fullmatch(name):
                histograms[share[1]][int(share[2])] = value
            else:
                self._writer.add_scalar(name, value, step)
        for name, shares in histograms.items():
            self._add_histogram(f"{name}_histogram", shares, step)
        self._writer.flush()

    def _add_histogram(self, name: str, shares: Mapping[int, float], step: int) -> None:
        """One bin for each lag from the least to the largest, reaching half below and half above it."""
        lags = range(min(shares), max(shares) + 1)
        self._writer.add_histogram_raw(
            name,
            min=lags[0] - 0.5,
            max=lags[-1] + 0.5,
            num=sum(shares.values()),
            sum=sum(lag * share for lag, share in shares.items()),
            sum_squares=sum(lag * lag * share for lag, share in shares.items()),
            bucket_limits=[lag + 0.5 for lag in lags],
            bucket_counts=[shares.get(lag, 0.0) for lag in lags],
            global_step=step,
        )

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """Read the rows of a `metrics.jsonl` in the order written."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
