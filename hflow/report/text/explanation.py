"""`hflow plan --explain`: the seconds of a node as a table, from parts to kernels and figures."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hflow.base.text import format_seconds
from hflow.planner.forecast.cost import Explanation, Term
from hflow.report.text.plan.assumptions import calibration_text
from hflow.report.text.section import add_row, dim, number, table, text

NOTE = (
    "Indented lines are what the line above consists of. Where they add up to more, the host works beside "
    "the device. Rates of devices and links are those of the plan's assumptions."
)


def render_explanation(found: Explanation) -> RenderableType:
    """Return the numbers that a node's seconds follow from, and a row for each part."""
    grid = Table.grid(padding=(0, 2))
    for label, value in found.facts:
        grid.add_row(Text(label, "bold"), Text(value))
    shown = table(text(found.node), text("where"), number("seconds"), text("figures of the calibration"))
    _add_rows(shown, found.terms, "")
    add_row(shown, Text("together", "bold"), "", Text(format_seconds(found.seconds), "bold"), "")
    return Group(grid, Text(), shown, Text(), Text(calibration_text(found.calibration)), dim(NOTE))


def _add_rows(to: Table, terms: Iterable[Term], indent: str) -> None:
    for term in terms:
        figures = ", ".join(f"{figure.name} {figure.value:g}" for figure in term.figures)
        add_row(to, f"{indent}{term.name}", term.where, format_seconds(term.seconds), dim(figures))
        _add_rows(to, term.terms, indent + "  ")
