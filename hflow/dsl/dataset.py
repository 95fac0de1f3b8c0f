"""`Dataset`: rows of typed columns, by name."""

from __future__ import annotations

from typing import Any

from hflow.dsl.annotations import unit_of
from hflow.dsl.source_location import caller_location
from hflow.errors import RecipeError
from hflow.graph.ir import DatasetSpec
from hflow.types import Unit

_COLUMN_UNITS = (Unit.TEXT, Unit.JSON, Unit.SEQUENCE)


class Dataset:
    """What feeds a stream: `Dataset(prompt=Text, answer=Text)`. The file is the configuration's.

    Args:
        name: its key under `data` in the configuration.
        **columns: column name -> `Text`, `Json` or `PerSequence` (a number).

    Raises:
        RecipeError: when there is no column or one is of another type.
    """

    def __init__(self, name: str = "train", /, **columns: Any) -> None:
        self.where = caller_location()
        if not isinstance(name, str) or not name.isidentifier():
            raise RecipeError(
                f"{self.where}: a dataset's name is an identifier such as 'train', not {name!r}"
            )
        if not columns:
            raise RecipeError(f"{self.where}: Dataset({name!r}) has no column: add one, such as prompt=Text")
        self.name = name
        self.columns = {column: self._unit(column, hint) for column, hint in columns.items()}

    def _unit(self, column: str, hint: Any) -> Unit:
        unit = unit_of(hint)
        if unit not in _COLUMN_UNITS:
            raise RecipeError(
                f"{self.where}: column {column!r} must be Text, Json or PerSequence, not {hint!r}"
            )
        return unit

    def __repr__(self) -> str:
        return f"Dataset({self.name!r})"

    def spec(self) -> DatasetSpec:
        """The dataset as a value."""
        return DatasetSpec(self.name, tuple(self.columns.items()), self.where)
