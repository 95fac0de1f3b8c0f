"""The output of `hflow report`: what a run reached, refused and suffered, in the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from hflow.report.curve_parts import ends_of
from hflow.report.formatting import seconds_text
from hflow.report.live import sparkline
from hflow.report.plan_text.section import add_row, dim, number, table, text
from hflow.report.run_page.curves import number_text, with_staleness
from hflow.report.run_page.view import STEP_SECONDS, faults, planned_seconds, story

if TYPE_CHECKING:
    from hflow.launch.runs import RunReport

CURVE_WIDTH = 24
ALWAYS = (STEP_SECONDS, "time/samples_per_second", "staleness/mean", "staleness/max")
TRAINING = ("kl", "entropy", "engine_kl", "grad_norm")


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
        cells = map(number_text, (*ends_of(record.curves[name]), min(values), max(values)))
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
    yield from (name for name in (*record.results, *train, *ALWAYS) if name in curves)


def _lines(report: RunReport) -> Iterator[Text]:
    """Yield speed against the plan, faults, and where the page comes from."""
    curve, planned = report.record.curves.get(STEP_SECONDS), planned_seconds(report)
    if curve:
        median = statistics.median(value for _, value in curve)
        beside = f", planned {seconds_text(planned)}" if planned else ""
        yield Text(f"a step takes {seconds_text(median)}{beside}")
    yield from (Text(line, "yellow") for line in faults(report))
    yield dim(f"--html FILE writes a page with all curves, the timeline and samples of {report.record.name}")
