"""The output of `hflow samples`: a table, or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hflow.report.formatting import plural

SHOWN = ("stream", "id", "row", "tokens", "oldest", "newest", "reward", "end", "step", "lag")
WHY = ("reason", "node")
"""Columns that are shown if any row has a value."""


def render_samples(rows: Sequence[dict[str, Any]], total: int) -> RenderableType:
    """Render a table of the most useful columns.

    Args:
        rows: column -> value, one mapping per sample.
        total: number of samples in all, including those of `rows`.
    """
    if not rows:
        return Text(f"{'none of ' * bool(total)}{plural(total, 'sample')}", style="dim")
    names = [*SHOWN, *(name for name in WHY if any(row[name] is not None for row in rows))]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        is_text = any(isinstance(row[name], str) for row in rows)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in names))
    more = "" if len(rows) == total else f"the first {len(rows)} of "
    said = f"{more}{plural(total, 'sample')}; --json and --csv have all columns"
    return Group(table, Text(said, style="dim"))


def as_csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return CSV: a line of names, then one line per sample."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
