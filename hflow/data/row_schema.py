"""Whether a row is what the recipe declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hflow.errors import DataError, nearest
from hflow.types import Unit

Columns = Mapping[str, Unit]
"""Declared column -> unit."""


def checked(row: Mapping[str, Any], columns: Columns, where: str) -> dict[str, Any]:
    """The declared columns of a row, in their declared order.

    Args:
        row: everything that the source has.
        columns: what is declared.
        where: the row's place, for messages.

    Raises:
        DataError: for a missing column or a value of the wrong type.
    """
    check_names(row, columns, where)
    for name, unit in columns.items():
        if not _fits(row[name], unit):
            raise DataError(
                f"{where}: column {name!r} is {row[name]!r:.40}, the recipe declares {_WANTED[unit]}"
            )
    return {name: row[name] for name in columns}


def check_names(known: Iterable[str], columns: Columns, where: str) -> None:
    """Refuse when a declared column is not among the `known` names.

    Raises:
        DataError: with the nearest name.
    """
    known = list(known)
    for name in columns:
        if name not in known:
            has = ", ".join(map(repr, known)) or "none"
            raise DataError(f"{where}: no column {name!r} (it has {has}){nearest(name, known)}")


_WANTED = {
    Unit.TEXT: "a text",
    Unit.SEQUENCE: "a number",
    Unit.GROUP: "a number",
    Unit.TOKEN: "a list of numbers",
    Unit.JSON: "a JSON value",
}


def _fits(value: Any, unit: Unit) -> bool:
    match unit:
        case Unit.TEXT:
            return isinstance(value, str)
        case Unit.SEQUENCE | Unit.GROUP:
            return isinstance(value, int | float)
        case Unit.TOKEN:
            return isinstance(value, list) and all(isinstance(item, int | float) for item in value)
        case Unit.JSON:
            return True
