"""`Dataset`: named rows with typed columns."""

from __future__ import annotations

from typing import Any

from hflow.base.errors import RecipeError
from hflow.base.validation import is_name
from hflow.dsl.annotations import hint_text, unit_of
from hflow.graph.errors import caller_location
from hflow.graph.ir import DatasetSpec
from hflow.types import Unit

_COLUMN_UNITS = (Unit.TEXT, Unit.MESSAGES, Unit.JSON, Unit.SEQUENCE, Unit.IMAGE, Unit.IMAGES)


class Dataset:
    """Rows that feed a stream of samples: `Dataset("train", prompt=Text, answer=Text)`.

    The configuration names the file that holds the rows.

    Args:
        name: the dataset's key under `data` in the configuration.
        **columns: the columns that the recipe reads, each `Text`, `Messages`, `Json`, `PerSequence` (a
            number), `Image` or `list[Image]`.

    Raises:
        RecipeError: if there is no column or a column has another type.
    """

    def __init__(self, name: str = "train", /, **columns: Any) -> None:
        self.where = caller_location()
        if not is_name(name):
            raise RecipeError(
                f"{self.where}: Dataset({name!r}): the name must be an identifier of ASCII letters, such "
                "as 'train'"
            )
        if not columns:
            raise RecipeError(
                f"{self.where}: Dataset({name!r}) has no columns. Declare at least one, such as prompt=Text"
            )
        self.name = name
        self.columns = {column: self._column_unit(column, hint) for column, hint in columns.items()}

    def __repr__(self) -> str:
        return f"Dataset({self.name!r})"

    def spec(self) -> DatasetSpec:
        """Return the dataset as a frozen value."""
        return DatasetSpec(self.name, tuple(self.columns.items()), self.where)

    def _column_unit(self, column: str, hint: Any) -> Unit:
        unit = unit_of(hint)
        if unit is None or unit not in _COLUMN_UNITS:
            raise RecipeError(
                f"{self.where}: Dataset({self.name!r}): column {column!r} must be Text, Messages, Json, "
                f"PerSequence, Image or list[Image], not {hint_text(hint)}"
            )
        return unit
