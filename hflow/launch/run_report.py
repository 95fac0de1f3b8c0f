"""`read_report`: everything that `hflow report` shows of a run, read from the run's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.errors import ConfigError
from hflow.json_text import read_json_object
from hflow.launch.run_record import RunRecord, read_run
from hflow.launch.shown_metrics import builtin_metrics
from hflow.metrics import find_metric
from hflow.runtime.execution.checkpoint import Checkpoints
from hflow.runtime.execution.sample_text_files import SampleRow, by_sample, read_samples
from hflow.runtime.ledger.overview import LedgerOverview, read_overview

MAX_TEXTS = 200
"""Texts that a report shows, at equal distances over the run."""


@dataclass(frozen=True)
class MeasuredSpan:
    """Something that a worker did, in seconds since the trace's first span."""

    worker: str
    """`worker 0`, or `controller`."""
    lane: str
    name: str
    start: float
    end: float
    step: int | None
    """Its training step, or the version of the weights that it used or made."""


@dataclass(frozen=True)
class RunReport:
    """A run, as `hflow report` shows it."""

    record: RunRecord
    units: Mapping[str, tuple[str, str]]
    """Metric that hflow computes -> (unit, meaning)."""
    spans: tuple[MeasuredSpan, ...]
    """In order of their start; empty if there is no trace."""
    ledger: LedgerOverview | None
    """None: the run has no ledger."""
    texts: Mapping[tuple[str, int], Sequence[SampleRow]]
    """Root stream and id of a sample -> its texts, of some of those whose text was kept; empty: none was."""
    checkpoints: tuple[int, ...]
    """Completed steps of the checkpoints that exist."""


def read_report(run: str) -> RunReport:
    """Read what a run has written. It may still be going.

    Args:
        run: a run's directory, or NAME for the latest run in `runs/NAME`.

    Raises:
        ConfigError: if there is no such run, it has no metrics yet, or a file is damaged.
    """
    record = read_run(run)
    directory = record.directory
    rows = read_samples(directory.samples)
    chosen = rows[:: -(-len(rows) // MAX_TEXTS) or 1]
    for row in chosen:
        if not _is_text(row):
            raise ConfigError(f"{directory.samples} has a damaged row of sample {row['id']}; delete its file")
    texts = by_sample(chosen)
    declared = {name: find_metric(name, builtin_metrics()) for name in record.curves}
    return RunReport(
        record=record,
        units={name: (metric.unit, metric.help) for name, metric in declared.items() if metric},
        spans=tuple(sorted(read_spans(directory.trace), key=lambda span: span.start)),
        ledger=read_overview(directory.ledger, texts) if directory.ledger.is_file() else None,
        texts=texts,
        checkpoints=tuple(Checkpoints(directory.checkpoints).steps),
    )


def read_spans(path: Path) -> Iterator[MeasuredSpan]:
    """Yield the spans of a trace; none if there is no file.

    Raises:
        ConfigError: for a file that is not a trace of hflow.
    """
    if not path.is_file():
        return
    try:
        events: list[Mapping[str, Any]] = read_json_object(path, "trace of a run")["traceEvents"]
        names = {
            event["pid"]: str(event["args"]["name"]) for event in events if event["name"] == "process_name"
        }
        for event in events:
            if event["ph"] == "X":
                args = event["args"]
                step = args.get("step", args.get("version"))
                yield MeasuredSpan(
                    worker=names[event["pid"]],
                    lane=str(event["cat"]),
                    name=str(event["name"]),
                    start=event["ts"] * 1e-6,
                    end=(event["ts"] + event["dur"]) * 1e-6,
                    step=int(step) if step is not None else None,
                )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not the trace of a run: {error!r}; delete it") from error


def _is_text(row: SampleRow) -> bool:
    """Return whether a row has what is shown of it: turns, their tokens, and numbers."""
    try:
        tokens = [token for turn in row["turns"] for token in turn.get("tokens", ())]
        turns = [turn[key] for turn in row["turns"] for key in ("role", "text", "trained")]
        numbers = [*row["values"].values(), *(number for _, *pair in tokens for number in pair)]
        return all(len(token) == 3 for token in tokens) and all(
            isinstance(value, int | float | str) for value in (*numbers, *turns)
        )
    except (AttributeError, LookupError, TypeError, ValueError):
        return False
