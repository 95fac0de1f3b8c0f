"""Checks dataset rows against the columns that a recipe declares."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hflow.errors import DataError, nearest
from hflow.types import Unit

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Halves of characters, which JSON can name, but no text has."""
RowSchema = Mapping[str, Unit]
"""Declared column -> its unit."""


def checked_row(row: Mapping[str, Any], columns: RowSchema, where: str) -> dict[str, Any]:
    """Return the declared columns of a row, in their declared order.

    Args:
        row: all columns of the source.
        columns: the declared ones.
        where: position of the row, for errors.

    Raises:
        DataError: if a column is missing or a value has the wrong type.
    """
    check_columns(row, columns, where)
    for name, unit in columns.items():
        if not _fits(row[name], unit):
            raise DataError(
                f"{where}: column {name!r} is {row[name]!r:.40}, but the recipe declares {_EXPECTED[unit]}; "
                "change one of them"
            )
    return {name: row[name] for name in columns}


def check_columns(known: Iterable[str], columns: RowSchema, where: str) -> None:
    """Check that every declared column is among the source's.

    Raises:
        DataError: if one is missing; suggests the nearest name.
    """
    known = list(known)
    for name in columns:
        if name not in known:
            known_names = ", ".join(map(repr, known)) or "none"
            raise DataError(f"{where}: no column {name!r} (it has {known_names}){nearest(name, known)}")


_EXPECTED = {
    Unit.TEXT: "a string",
    Unit.SEQUENCE: "a number",
    Unit.GROUP: "a number",
    Unit.TOKEN: "a list of numbers",
    Unit.JSON: "a JSON value",
}


def _fits(value: Any, unit: Unit) -> bool:
    match unit:
        case Unit.TEXT:
            return isinstance(value, str) and _SURROGATE.search(value) is None
        case Unit.SEQUENCE | Unit.GROUP:
            return isinstance(value, int | float)
        case Unit.TOKEN:
            return isinstance(value, list) and all(isinstance(item, int | float) for item in value)
        case Unit.JSON:
            return True
