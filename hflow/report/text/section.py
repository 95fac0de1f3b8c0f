"""`Section`: one part of the report; the styles that all parts share, and limits of a step as sentences."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from hflow.base.text import format_setting, format_share
from hflow.planner.plan.forecast import Limit, Remedy
from hflow.report.tables import Phrase, TableCell, TableView, Tone

WIDEST = 120
"""Largest width of a report in columns; longer lines are hard to read."""
GAP = 3
"""Space between two columns of a table."""

Cell = str | Text
TONES: Mapping[Tone, str] = {"plain": "", "strong": "bold", "quiet": "dim"}
"""Tone of words -> its style."""


@dataclass(frozen=True)
class Section:
    """A title, a line that explains it, and the content."""

    title: str
    note: str = ""
    body: tuple[RenderableType, ...] = ()
    absent: str = ""
    """Why there is no content."""


class Report:
    """Parts that rich can print at any width, up to `WIDEST` columns; a function returns them for a width."""

    def __init__(self, parts: Callable[[int], Iterable[RenderableType]]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the parts at the width of the console."""
        width = min(options.max_width, WIDEST)
        for part in self._parts(width):
            yield from console.render(part, options.update(width=width))


def frame(title: str, rows: Iterable[tuple[str, RenderableType]]) -> Panel:
    """Return a frame with a labelled line for each question that a reader asks first."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(label, value)
    return Panel(grid, title=Text(title, style="bold"), box=box.ROUNDED)


def shown(section: Section) -> Iterator[RenderableType]:
    """Yield a section, with its title line."""
    yield Text()
    yield Rule(Text(section.title, style="bold"), align="left", characters="━", style="dim")
    if section.note:
        yield dim(section.note)
    yield from section.body


def text(name: str, widest: int | None = None) -> Column:
    """Return a column of words, which wraps if there is no room."""
    return Column(name, overflow="fold", max_width=widest)


def number(name: str) -> Column:
    """Return a column of numbers with units, which never wraps."""
    return Column(name, justify="right", no_wrap=True)


def table(*columns: Column) -> Table:
    """Return a table with a line under its head only."""
    return Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")


def add_row(to: Table, *cells: Cell) -> None:
    """Add cells literally: brackets in a name are not markup."""
    to.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))


def lines(rows: Iterable[Cell]) -> Text:
    """Join rows in one cell, one below the other."""
    return Text("\n").join(row if isinstance(row, Text) else Text(row) for row in rows)


def drawn_cell(cell: TableCell) -> Text:
    """Return a cell of a table with the styles of its tones."""
    phrases: tuple[Phrase, ...] = ((cell, "plain"),) if isinstance(cell, str) else cell
    return Text.assemble(*((words, TONES[tone]) for words, tone in phrases))


def table_section(view: TableView) -> Section:
    """Return a table of the plan as a section."""
    if view.absent:
        return Section(view.title, absent=view.absent)
    columns = (number(name) if i in view.right else text(name) for i, name in enumerate(view.columns))
    drawn = table(*columns)
    for row in view.rows:
        add_row(drawn, *map(drawn_cell, row))
    return Section(view.title, view.note, (drawn, *map(dim, view.after)))


def dim(words: str) -> Text:
    """Return words in the style of explanations."""
    return Text(words, style="dim")


NO_REMEDY = "More staleness and other placements were tried: none makes a step noticeably shorter."


def limit_text(limit: Limit) -> str:
    """Return the limit of a step, and by how much each remedy shortens it."""
    if not limit.remedies:
        return f"{limit.cause}. {NO_REMEDY}" if limit.idle else f"{limit.cause}."
    first, *others = limit.remedies
    more = "".join(f", with {_settings(other)} {format_share(other.gain)} less" for other in others)
    return f"{limit.cause}. With {_settings(first)} a step takes {format_share(first.gain)} less{more}."


def _settings(remedy: Remedy) -> str:
    quoted = (
        (key, shlex.quote(value) if isinstance(value, str) else value) for key, value in remedy.settings
    )
    return " ".join(format_setting(key, value) for key, value in quoted)
