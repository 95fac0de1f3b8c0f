"""`RowSchema` checks rows of a source against the columns that a recipe declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hflow.base.errors import DataError, nearest, shorten
from hflow.base.json_text import find_json_problem
from hflow.data.images.files import NOWHERE, ImageSource, read_image
from hflow.data.text.messages import normal_messages
from hflow.types import Image, Unit

Check = Callable[[Sequence[Mapping[str, Any]], str], None]
"""Raises a `DataError` for a conversation that is not what its reader needs. Called with its name, too."""
_LISTED_CHARACTERS = 300
"""The most characters of a list of columns in an error."""


@dataclass(frozen=True)
class RowSchema:
    """The columns that a recipe declares, and what a source calls them."""

    units: Mapping[str, Unit]
    """Declared column -> its unit."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Declared column -> the source's name for it, where that differs."""
    key: str = "data.NAME"
    """Key of the source in the configuration, for errors."""
    checks: Mapping[str, Check] = field(default_factory=dict)
    """Declared column of messages -> what its readers need."""
    images: ImageSource = NOWHERE
    """Where images that rows name may come from."""

    def __post_init__(self) -> None:
        """Check that the recipe declares what `names` maps.

        Raises:
            DataError: for a column that it does not declare.
        """
        for name in self.names:
            if name not in self.units:
                raise DataError(
                    f"{self.key}.map.{name}: the recipe declares no column {name!r}"
                    f"{nearest(name, self.units) or f'; it declares {_listed(self.units)}'}"
                )

    @property
    def source_columns(self) -> list[str]:
        """The source's columns to read, each once."""
        return list(dict.fromkeys(map(self._source_name, self.units)))

    def check(self, known: Iterable[str], where: str) -> None:
        """Check that every declared column is among the source's.

        Raises:
            DataError: if some are missing; names them all, and how to map them.
        """
        known = list(known)
        missing = [name for name in self.units if self._source_name(name) not in known]
        for name in missing:
            column, _, inner = self._source_name(name).partition(".")
            if inner and column in known:
                raise DataError(
                    f"{where}: {self.key}.map.{name} is {self._source_name(name)!r}, but rows are mapped by "
                    f"whole columns, such as {column!r}. Write {inner!r} as a column of its own, or declare "
                    f"{column!r} as Json and read {inner!r} in a body"
                )
        if len(missing) == 1:
            name, source = missing[0], self._source_name(missing[0])
            near = nearest(source, known)
            fix = f"{near} Set" if near else "; set"
            raise DataError(
                f"{where}: no column {source!r} (it has {_listed(known)}){fix} {self.key}.map.{name} to "
                f"the column that holds {name!r}"
            )
        if missing:
            keys = " and ".join(f"{self.key}.map.{name}" for name in missing)
            raise DataError(
                f"{where}: no columns {_listed(map(self._source_name, missing))} (it has {_listed(known)}); "
                f"set {keys} to the columns that hold them"
            )

    def row(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the declared columns of a source's row, in their declared order.

        Raises:
            DataError: if a column is missing or a value has the wrong type.
        """
        self.check(row, where)
        values = {name: row[self._source_name(name)] for name in self.units}
        for name, unit in self.units.items():
            if unit is Unit.MESSAGES:
                values[name] = self._messages(name, values[name], where)
            elif unit in (Unit.IMAGE, Unit.IMAGES):
                values[name] = self._images(name, unit, values[name], where)
            elif problem := find_json_problem(values[name]):
                raise DataError(f"{where}: column {self._source_name(name)!r} {problem}; change the value")
            if not _fits(values[name], unit):
                fix = "write it as a string, or declare the column as Json"
                raise DataError(
                    f"{where}: column {self._source_name(name)!r} is {values[name]!r:.40}, but the recipe "
                    f"declares {_EXPECTED[unit]}; {fix if unit is Unit.TEXT else 'change one of them'}"
                )
        return values

    def _messages(self, name: str, value: Any, where: str) -> list[dict[str, Any]]:
        path = f"{where}: {self._source_name(name)}"
        if isinstance(value, str):
            raise DataError(
                f"{path} must be a list of messages, but it is {value!r:.40}; write each message as "
                '{"role": "user", "content": "..."}, or declare the column as Text or Json'
            )
        messages = normal_messages(value, path, self.images)
        if name in self.checks:
            self.checks[name](messages, path)
        return messages

    def _images(self, name: str, unit: Unit, value: Any, where: str) -> Image | list[Image]:
        path = f"{where}: column {self._source_name(name)!r}"
        given = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if unit is Unit.IMAGE and len(given) != 1:
            raise DataError(f"{path} has {len(given)} images; declare it as list[Image]")
        try:
            images = [read_image(item, self.images) for item in given]
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        return images[0] if unit is Unit.IMAGE else images

    def _source_name(self, name: str) -> str:
        return self.names.get(name, name)


def _listed(names: Iterable[str]) -> str:
    return shorten(", ".join(map(repr, names)), _LISTED_CHARACTERS) or "none"


_EXPECTED = {
    Unit.TEXT: "a string",
    Unit.SEQUENCE: "a number of 64 bits",
    Unit.GROUP: "a number of 64 bits",
    Unit.TOKEN: "a list of numbers of 64 bits",
    Unit.JSON: "a JSON value",
}


def _fits(value: Any, unit: Unit) -> bool:
    match unit:
        case Unit.TEXT:
            return isinstance(value, str)
        case Unit.SEQUENCE | Unit.GROUP:
            return _is_number(value)
        case Unit.TOKEN:
            return isinstance(value, list) and all(map(_is_number, value))
        case Unit.MESSAGES | Unit.JSON | Unit.IMAGE | Unit.IMAGES | Unit.PIXELS:
            return True


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that 64 bits can hold."""
    return isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)
