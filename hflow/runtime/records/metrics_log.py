"""Writes every step's metrics to `metrics.jsonl` and to TensorBoard."""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import histogram_raw, scalar
from tensorboardX.summary import text as text_summary

from hflow.base.durable_files import write_error
from hflow.metrics import Metric, find_metric
from hflow.runtime.records.metric_columns import ColumnsWriter

MAX_ROW_BYTES = 1 << 24


class MetricsLog:
    """Appends one JSON object per row, flushed at once, so that a killed run keeps what it measured.

    A resumed run appends to the same file. Where a step has two rows, the later one counts.

    Args:
        metrics: declarations; those that are histograms are logged as such in TensorBoard.

    Raises:
        WriteError: when a file cannot be written. `write` raises it too.
    """

    def __init__(self, path: Path, tensorboard: Path, metrics: Iterable[Metric] = ()) -> None:
        self._path = path
        self._tensorboard = tensorboard
        self._histograms = [metric for metric in metrics if metric.is_histogram]
        with _explained(tensorboard):
            tensorboard.mkdir(parents=True, exist_ok=True)
            # Not `SummaryWriter`: it writes on a thread, and waits for ever when that fails.
            self._events = EventsWriter(str(tensorboard / "events"))
        with _explained(path):
            _drop_partial_row(path)
            self._file = path.open("ab")
            self._columns = ColumnsWriter(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step.

        In the JSON, a value that is not finite is null, and each bin of a histogram is a value. In
        TensorBoard the bins are one histogram.
        """
        row = {"step": step, **{name: _json_number(value) for name, value in values.items()}}
        with _explained(self._path):
            line = json.dumps(row, allow_nan=False).encode() + b"\n"
            self._file.write(line)
            self._file.flush()
            self._columns.add(row, line)
        summary = Summary()
        histograms: dict[Metric, dict[int, float]] = defaultdict(dict)
        for name, value in values.items():
            if metric := find_metric(name, self._histograms):
                histograms[metric][int(metric.key_of(name) or 0)] = value
            else:
                summary.MergeFrom(scalar(name, value))
        for metric, shares in histograms.items():
            summary.MergeFrom(_histogram(metric.member("histogram"), shares))
        self._write_events(step, summary)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Log a text of a step, in Markdown, in TensorBoard only."""
        self._write_events(step, text_summary(name, text))

    def rewind(self, step: int) -> None:
        """Have TensorBoard drop what it has of later steps than `step`, which the run takes again."""
        session = SessionLog(status=SessionLog.START)
        with _explained(self._tensorboard):
            self._write_event(Event(wall_time=time.time(), step=step + 1, session_log=session))

    def close(self) -> None:
        """Close both files. Every row that was written is on disk already."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._events.close()

    def _write_events(self, step: int, summary: Summary) -> None:
        with _explained(self._tensorboard):
            self._write_event(Event(wall_time=time.time(), step=step, summary=summary))

    def _write_event(self, event: Event) -> None:
        self._events.write_event(event)
        # Not `EventsWriter.flush`: it waits until the disk has the bytes, for milliseconds of every step.
        self._events._py_recordio_writer._writer.flush()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an error of the system into one line.

    Raises:
        WriteError: when the block raises such an error.
    """
    try:
        yield
    except OSError as error:
        raise write_error(path, error) or error from error


def _histogram(tag: str, shares: Mapping[int, float]) -> Summary:
    """Return one bin for each whole number from the smallest to the largest, centred on it."""
    bins = range(min(shares), max(shares) + 1)
    return histogram_raw(
        tag,
        min=bins[0] - 0.5,
        max=bins[-1] + 0.5,
        num=sum(shares.values()),
        sum=sum(value * share for value, share in shares.items()),
        sum_squares=sum(value * value * share for value, share in shares.items()),
        bucket_limits=[value + 0.5 for value in bins],
        bucket_counts=[shares.get(value, 0.0) for value in bins],
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
