"""`Row`: a key of another library and its counterpart. The tables of `docs/coming-from` show the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

Status = Literal["same", "automatic", "manual", "missing"]


@dataclass(frozen=True)
class Row:
    """One key of another library, or several that have no counterpart for the same reason."""

    key: str
    """The dotted key. `*` stands for any text."""
    status: Status
    """`same`: hflow has it, under the names `ours`; `automatic`: hflow chooses; `manual`: hflow has it in
    another form, which is not written; `missing`: none of these."""
    ours: tuple[str, ...] = ()
    """hflow's keys; without a dot, parts of a recipe."""
    note: str = ""
    """What differs, where the choice of hflow shows, or what to use instead. Markdown."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Value -> what hflow has for it, in Markdown, if that depends on the value."""

    def matches(self, key: str) -> bool:
        """Return whether the row is about a key."""
        return key == self.key or ("*" in self.key and fnmatchcase(key, self.key))


def same(key: str, ours: str, note: str = "", values: Mapping[str, str] | None = None) -> Row:
    """Return a row of a key that hflow has, under one or more names with spaces between them."""
    return Row(key, "same", tuple(ours.split()), note, values or {})


def automatic(key: str, note: str, ours: str = "") -> Row:
    """Return a row of a key that hflow does not need. The note says what it does, and where that shows."""
    return Row(key, "automatic", tuple(ours.split()), note)


def manual(key: str, note: str) -> Row:
    """Return a row of a key that hflow has in another form, such as a body of the recipe: the note."""
    return Row(key, "manual", (), note)


def missing(key: str, note: str = "") -> Row:
    """Return a row of a key without a counterpart."""
    return Row(key, "missing", (), note)


def find_row(rows: Iterable[Row], key: str) -> Row | None:
    """Return the row of a key. A row without a `*` comes before those with one."""
    rows = tuple(rows)
    exact = next((row for row in rows if row.key == key), None)
    return exact or next((row for row in rows if "*" in row.key and row.matches(key)), None)
