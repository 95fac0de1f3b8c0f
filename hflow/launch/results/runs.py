"""What runs have recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError
from hflow.base.files import read_json_object, resolved
from hflow.launch.running.shown_metrics import builtin_metrics
from hflow.launch.targets import resolve
from hflow.metrics import find_metric
from hflow.runtime.ledger.query import LedgerOverview, read_overview
from hflow.runtime.records.activity import Activity, read_activity
from hflow.runtime.records.metric_columns import Curve, read_curves
from hflow.runtime.records.sample_text_files import SampleRow, by_sample, read_newest, read_some
from hflow.runtime.saving.checkpoint import Checkpoints
from hflow.runtime.saving.run_directory import RunDirectory
from hflow.training.interface import LOSS


@dataclass(frozen=True)
class RunRecord:
    """A run as its files describe it."""

    directory: RunDirectory
    config: Mapping[str, Any]
    """The whole configuration as plain values."""
    plan: Mapping[str, Any]
    """The rows of its plan, which may be those of an earlier version of hflow."""
    curves: Mapping[str, Curve]
    """Metric -> its values. Where a step was done twice, the later value counts."""
    summary: Mapping[str, Any] | None
    """Content of `summary.json`; None: the run has not ended, or failed."""
    is_running: bool
    error: str | None = None
    """What it failed with; None: it did not, or was killed."""

    @property
    def name(self) -> str:
        """NAME/TIME."""
        path = resolved(self.directory.path)
        return f"{path.parent.name}/{path.name}"

    @property
    def results(self) -> tuple[str, ...]:
        """The metrics that tell how well it learned: numbers that nodes give samples, then losses."""
        nodes = self.plan["graph"]["nodes"]
        fields = [
            f"{node['stream']}/{returned['field']}"
            for node in nodes
            if node["spec"]["verb"] != "train"
            for returned in node["spec"]["returns"]
        ]
        losses = [LOSS.member(node["spec"]["name"]) for node in nodes if node["spec"]["verb"] == "train"]
        return tuple(name for name in dict.fromkeys((*fields, *losses)) if name in self.curves)

    @property
    def steps(self) -> int:
        """Completed steps."""
        return max((curve[-1][0] for curve in self.curves.values()), default=0)

    @property
    def state(self) -> str:
        """How the run ended, or that it is still going."""
        planned = self.config.get("steps")
        if self.is_running:
            return f"still going, {self.steps} of {planned} steps"
        if self.error is not None:
            return f"failed after {self.steps} of {planned} steps: {self.error}"
        if self.summary is None:
            return f"failed or killed after {self.steps} of {planned} steps"
        return f"{self.summary.get('reason')} after {self.summary.get('steps')} steps"


def read_run(run: str, *, may_lack_metrics: bool = False) -> RunRecord:
    """Return the record of a run; with `may_lack_metrics`, also of one that has not completed its first step.

    Raises:
        ConfigError: if there is no such run, it has no metrics yet, or a file is damaged.
    """
    directory = resolve(run).require_run()
    file = read_json_object(directory.plan, "plan of a run")
    if not _is_plan(file):
        raise ConfigError(f"{directory.plan} is not the plan of a run, or damaged; name another run")
    is_running = directory.is_running
    has_failed = directory.error.is_file() and not is_running
    error = directory.error.read_text("utf-8", "replace").strip() if has_failed else None
    curves = read_curves(directory.metrics) if directory.metrics.is_file() else {}
    if not curves and not may_lack_metrics:
        ended = f"it failed: {error}" if error else "it ended before its first step"
        when = "wait for its first step" if is_running else f"{ended}; name another run"
        raise ConfigError(f"the run in {directory.path} has no metrics yet; {when}")
    has_ended = directory.summary.is_file() and not is_running and not has_failed
    return RunRecord(
        directory=directory,
        config=file["config"],
        plan=file["plan"],
        curves=curves,
        summary=read_json_object(directory.summary, "summary of a run") if has_ended else None,
        is_running=is_running,
        error=error,
    )


def _is_plan(file: Mapping[str, Any]) -> bool:
    """Return whether a plan file has the parts that are read here, whatever version of hflow wrote it."""
    try:
        nodes = file["plan"]["graph"]["nodes"]
        texts = [node["spec"][key] for node in nodes for key in ("name", "verb")]
        texts += [node["stream"] for node in nodes]
        texts += [returned["field"] for node in nodes for returned in node["spec"]["returns"]]
        return isinstance(file["config"]["steps"], int) and all(isinstance(text, str) for text in texts)
    except (AttributeError, LookupError, TypeError):
        return False


MAX_TEXTS = 200
"""Texts that a report shows, at equal distances over the run."""
NEWEST_STEPS, NEWEST_SAMPLES = 3, 48
"""Steps whose texts a live report shows, and the samples that it shows beside them, which finished last."""


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
    """The training step, counted from 1; of what uses or makes a version of the weights, the step that
    begins with them."""


@dataclass(frozen=True)
class MeasuredTrace:
    """What the workers of a run did."""

    start: float | None = None
    """When the first span began, in seconds since the epoch; None: the trace does not tell."""
    end: float | None = None
    """When the trace was written. It has all that had ended by then."""
    spans: tuple[MeasuredSpan, ...] = ()
    """In order of their start; empty if there is no trace."""

    def until_now(self, activity: Activity | None, now: float) -> tuple[MeasuredSpan, ...]:
        """Return the spans, and those of what workers still do, which end `now`, in seconds since the epoch.

        If work has ended since the trace was written, they end with the trace.
        """
        if self.start is None or self.end is None or activity is None:
            return self.spans
        is_whole = all(work.start <= self.end for work in activity.work)
        end = now if is_whole else self.end
        doing = [
            MeasuredSpan(
                f"worker {worker}", work.lane, work.name, work.start - self.start, end - self.start, work.step
            )
            for work in activity.work
            for worker in work.workers
            if work.start < end
        ]
        return (*self.spans, *doing)


@dataclass(frozen=True)
class RunReport:
    """A run, as `hflow report` shows it."""

    record: RunRecord
    units: Mapping[str, tuple[str, str]]
    """Metric that hflow computes -> (unit, meaning)."""
    trace: MeasuredTrace
    ledger: LedgerOverview | None
    """None: the run has no ledger."""
    texts: Mapping[tuple[str, int], Sequence[SampleRow]]
    """Root stream and id of a sample -> its texts, of some of those whose text was kept; empty: none was."""
    checkpoints: tuple[int, ...]
    """Completed steps of the checkpoints that exist."""
    activity: Activity | None = None
    """What a run that is going does now, or one that was killed did last."""


def read_report(run: str, *, is_live: bool = False) -> RunReport:
    """Read what a run has written. It may still be going.

    Args:
        run: a run's directory, or NAME for the latest run in `runs/NAME`.
        is_live: choose the samples that finished last. The run may lack metrics.

    Raises:
        ConfigError: if there is no such run, it has no metrics yet, or a file is damaged.
    """
    record = read_run(run, may_lack_metrics=is_live)
    directory = record.directory
    rows = read_newest(directory.samples, NEWEST_STEPS) if is_live else read_some(directory.samples)
    chosen = rows[:: -(-len(rows) // MAX_TEXTS) or 1]
    for row in chosen:
        if not _is_text(row):
            raise ConfigError(f"{directory.samples} has a damaged row of sample {row['id']}; delete its file")
    texts = by_sample(chosen)
    num_newest = NEWEST_SAMPLES if is_live else 0
    declared = {name: find_metric(name, builtin_metrics()) for name in record.curves}
    return RunReport(
        record=record,
        units={name: (metric.unit, metric.help) for name, metric in declared.items() if metric},
        trace=read_trace(directory.trace),
        ledger=read_overview(directory.ledger, texts, num_newest) if directory.ledger.is_file() else None,
        texts=texts,
        checkpoints=tuple(Checkpoints(directory.checkpoints).steps),
        activity=None if record.summary is not None else read_activity(directory.activity),
    )


def read_trace(path: Path) -> MeasuredTrace:
    """Return the trace in a file; an empty one if there is no file.

    Raises:
        ConfigError: for a file that is not a trace of hflow.
    """
    if not path.is_file():
        return MeasuredTrace()
    try:
        file = read_json_object(path, "trace of a run")
        start, end = (_number(file.get("otherData", {}), key) for key in ("start", "end"))
        spans = sorted(_spans(file["traceEvents"]), key=lambda span: span.start)
        return MeasuredTrace(start, end, tuple(spans))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not the trace of a run: {error!r}; delete it") from error


def _number(values: Mapping[str, Any], key: str) -> float | None:
    return None if values.get(key) is None else float(values[key])


def _spans(events: Sequence[Mapping[str, Any]]) -> Iterator[MeasuredSpan]:
    names = {event["pid"]: str(event["args"]["name"]) for event in events if event["name"] == "process_name"}
    devices = [event["args"] for event in events if event["ph"] == "X" and event["cat"] == "device"]
    first = 1 if any(args.get("step") == 0 for args in devices) else 0  # older runs count from 0
    for event in events:
        if event["ph"] == "X":
            args = event["args"]
            begun = (args[key] + add for key, add in (("step", first), ("version", 1)) if key in args)
            step = next(begun, None)
            yield MeasuredSpan(
                worker=names[event["pid"]],
                lane=str(event["cat"]),
                name=str(event["name"]),
                start=event["ts"] * 1e-6,
                end=(event["ts"] + event["dur"]) * 1e-6,
                step=int(step) if step is not None else None,
            )


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
