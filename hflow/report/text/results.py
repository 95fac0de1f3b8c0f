"""The outputs of `hflow report` (what a run reached, refused and suffered) and of `hflow eval`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from hflow.base.text import format_number, format_seconds, pluralize
from hflow.report.formatting import ends_of
from hflow.report.html.run.curves import with_staleness
from hflow.report.html.run.view import STEP_SECONDS, faults, planned_seconds, story
from hflow.report.text.live import sparkline
from hflow.report.text.section import add_row, dim, number, table, text

if TYPE_CHECKING:
    from hflow.launch.checkpoints.evaluate import EvaluationReport
    from hflow.launch.results.runs import RunReport


CURVE_WIDTH = 24
ALWAYS = (STEP_SECONDS, "time/samples_per_second", "staleness/mean", "staleness/max")
TRAINING = ("kl", "entropy", "ref_kl", "engine_kl", "grad_norm", "mfu")
DEVICES = ("seconds/", "memory/", "memory_planned/")
"""Beginnings of the names of metrics that are always shown."""


def render_run_report(report: RunReport) -> RenderableType:
    """Render a headline, the curves, refusals and faults."""
    record = report.record
    parts: list[RenderableType] = [Text(f"{record.name}: {record.state}", "bold")]
    parts += [dim(line) for line in story(report)]
    shown = table(
        text("metric"), number("first"), number("final"), number("lowest"), number("highest"), text("curve")
    )
    for name in _names(report):
        values = [value for _, value in record.curves[name]]
        cells = map(format_number, (*ends_of(record.curves[name]), min(values), max(values)))
        add_row(shown, name, *cells, Text(sparkline(values, CURVE_WIDTH), style="cyan"))
    parts += [Text(), shown, dim("first and final: means of a tenth of the values"), Text()]
    if report.ledger and report.ledger.refused:
        refused = table(text("refused or dropped"), number("samples"), text("node"), text("an error"))
        for row in report.ledger.refused:
            add_row(refused, row.reason, f"{row.count:,}", row.node, row.message)
        parts += [refused, Text()]
    return Group(*parts, *_lines(report))


def _names(report: RunReport) -> Iterator[str]:
    record = report.record
    nodes = [node["spec"] for node in record.plan["graph"]["nodes"]]
    train = [f"{spec['name']}/{name}" for spec in nodes if spec["verb"] == "train" for name in TRAINING]
    curves = with_staleness(record.curves)
    devices = (name for beginning in DEVICES for name in curves if name.startswith(beginning))
    yield from (name for name in (*record.results, *train, *ALWAYS, *devices) if name in curves)


def _lines(report: RunReport) -> Iterator[Text]:
    """Yield speed against the plan, faults, and where the page comes from."""
    curve, planned = report.record.curves.get(STEP_SECONDS), planned_seconds(report)
    if curve:
        median = statistics.median(value for _, value in curve)
        beside = f", planned {format_seconds(planned)}" if planned else ""
        yield Text(f"a step takes {format_seconds(median)}{beside}")
    yield from (Text(line, "yellow") for line in faults(report))
    yield dim(f"--html FILE writes a page with all curves, the timeline and samples of {report.record.name}")


def render_evaluation(report: EvaluationReport) -> RenderableType:
    """Render what was evaluated, the scores, and the file that has them."""
    steps = "" if report.steps is None else f" after {pluralize(report.steps, 'step')}"
    heads = [
        Text(f"{name}: {path}{steps}", "bold", no_wrap=True, overflow="ignore")
        for name, path in report.models.items()
    ]
    has_refused = any(stream.num_refused for stream in report.streams)
    ks = sorted({k for stream in report.streams for field in stream.fields for k in field.pass_at})
    shown = table(
        Column("stream", no_wrap=True),
        number("prompts"),
        number("samples"),
        *([number("refused")] if has_refused else []),
        Column("score", no_wrap=True),
        number("mean"),
        *(number(f"pass@{k}") for k in ks),
    )
    for stream in report.streams:
        counts = [f"{stream.num_prompts:,}", f"{stream.num_samples:,}"]
        counts += [f"{stream.num_refused:,}"] if has_refused else []
        for field in stream.fields:
            error = "" if field.error is None else f" ± {field.error:.2g}"
            passed = (f"{field.pass_at[k]:.4g}" if k in field.pass_at else "" for k in ks)
            mean = f"{field.mean:.4g}{error}"
            add_row(shown, stream.stream, *counts, field.field, mean, *passed)
        if not stream.fields:
            add_row(shown, stream.stream, *counts, "none", "", *[""] * len(ks))
    note = (
        f"±: standard error over prompts; correct: a score of {report.threshold:g} or more"
        if ks
        else ("±: standard error over prompts")
    )
    return Group(
        *heads,
        Text(),
        shown,
        dim(note),
        *map(dim, _partial(report)),
        Text(f"results: {report.file}", no_wrap=True, overflow="ignore"),
    )


def _partial(report: EvaluationReport) -> Iterator[str]:
    """Yield a line for each score whose pass@k leaves out prompts, and for each stream without scores."""
    for stream in report.streams:
        if not stream.fields:
            reason = "all of its samples were refused" if stream.num_refused else "no node scored a sample"
            yield f"{stream.stream}: {reason}"
        for field in stream.fields:
            if not field.pass_at and stream.group_size > 1:
                yield f"{stream.stream}/{field.field}: no pass@k, as no prompt has as many scored samples"
            if field.pass_at and field.pass_at_prompts < field.num_prompts:
                yield (
                    f"{stream.stream}/{field.field}: pass@k over the {field.pass_at_prompts:,} of "
                    f"{field.num_prompts:,} prompts with {max(field.pass_at)} scored samples or more; "
                    "--pass-at with a smaller k counts more prompts"
                )
