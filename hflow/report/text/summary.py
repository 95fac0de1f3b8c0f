"""Renders the summary of a run, which is printed when it ends."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hflow.report.formatting import format_missing
from hflow.runtime.records.run_summary import RunSummary


def render_summary(summary: RunSummary) -> RenderableType:
    """Render a headline, the values, and the directory of the results."""
    steps = f" after {summary.steps} steps" if summary.steps else ""
    head = Text(f"{summary.name}: {summary.reason}{steps}, {summary.seconds:.1f} s", style="bold")
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(no_wrap=True, overflow="ignore")
    for label, value in summary.values.items():
        table.add_row(label, f"{value:.4g}")
    for stream, missing in summary.not_evaluated.items():
        table.add_row(stream, format_missing(*missing))
    if summary.sample_ends:
        table.add_row("samples", _format_ends(summary.sample_ends))
    table.add_row("results", Text(str(summary.directory)))
    return Group(head, table)


def _format_ends(samples: Mapping[str, int]) -> str:
    """Return the number of samples for each end: trained first, then by number."""
    ends = sorted(samples.items(), key=lambda end: (end[0] != "trained", -end[1]))
    return ", ".join(f"{num:,} {end}" for end, num in ends)
