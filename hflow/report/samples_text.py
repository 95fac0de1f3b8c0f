"""`hflow samples`: rows of samples for people, or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

SHOWN = ("stream", "id", "row", "tokens", "oldest", "newest", "reward", "end", "step", "lag")
WHY = ("reason", "node")
"""Shown where any row has them."""


def render_samples(rows: Sequence[dict[str, Any]], total: int) -> RenderableType:
    """A table of the columns that people look at first.

    Args:
        rows: column -> value, for each sample.
        total: how many samples there are beside those of `rows`, these included.
    """
    names = [*SHOWN, *(name for name in WHY if any(row[name] is not None for row in rows))]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        is_text = any(isinstance(row[name], str) for row in rows)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in names))
    more = "" if len(rows) == total else f"the first {len(rows)} of "
    return Group(table, Text(f"{more}{total:,} samples; --json and --csv have all columns", style="dim"))


def as_csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A line of names, and one for each sample."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
