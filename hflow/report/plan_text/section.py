"""`Section`: one part of the report, and the looks that all parts share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich import box
from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

WIDEST = 120
"""Columns that a report takes at most: longer lines are hard to read."""
NO_FIGURES = "the plan has no figures of its devices"
GAP = 3
"""Columns between two columns of a table."""

Cell = str | Text


@dataclass(frozen=True)
class Section:
    """A title, a line for those who do not know the word, and what there is to show."""

    title: str
    note: str = ""
    body: tuple[RenderableType, ...] = ()
    absent: str = ""
    """Why there is nothing to show."""


def shown(section: Section) -> Iterator[RenderableType]:
    """A section below what was printed before."""
    yield Text()
    yield Rule(Text(section.title, style="bold"), align="left", characters="━", style="dim")
    if section.note:
        yield dim(section.note)
    yield from section.body


def text(name: str, widest: int | None = None) -> Column:
    """A column of words, which folds where there is no room."""
    return Column(name, overflow="fold", max_width=widest)


def number(name: str) -> Column:
    """A column of numbers with their units, which never folds."""
    return Column(name, justify="right", no_wrap=True)


def table(*columns: Column) -> Table:
    """A table with a line under its head and no other."""
    return Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")


def add_row(to: Table, *cells: Cell) -> None:
    """Add cells as they are: brackets in a name are no markup."""
    to.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))


def lines(rows: Iterable[Cell]) -> Text:
    """Rows below each other in one cell."""
    return Text("\n").join(row if isinstance(row, Text) else Text(row) for row in rows)


def dim(words: str) -> Text:
    """What explains and is not itself the matter."""
    return Text(words, style="dim")
