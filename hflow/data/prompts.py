"""Datasets: rows by number, of the columns that a recipe declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hflow.data.arithmetic import Addition, AdditionPairs
from hflow.data.columns import Columns
from hflow.data.jsonl import JsonLines
from hflow.data.parquet import Parquet
from hflow.errors import DataError, nearest


@dataclass(frozen=True)
class DataSettings:
    """Where a dataset comes from: a file, or a generator by its name."""

    path: str | None = None
    """A `.jsonl` or `.parquet` file."""
    generator: str | None = None
    """`addition` or `addition-pairs`."""
    split: str = "train"
    """Which part of a generator's rows."""
    shuffle: bool = True
    """Whether each epoch goes through the rows in another order (see `RowOrder`)."""
    limit: int | None = None
    """Use this many rows from the beginning; None uses all."""


class PromptSource(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """The declared columns of row `index`.

        Raises:
            DataError: when the row is not what the recipe declares.
        """
        ...


_FILES: Mapping[str, Callable[[Path, Columns], PromptSource]] = {
    ".jsonl": JsonLines,
    ".parquet": Parquet,
}
_GENERATORS: Mapping[str, Callable[[str, Columns], PromptSource]] = {
    "addition": Addition,
    "addition-pairs": AdditionPairs,
}


def open_dataset(settings: DataSettings, columns: Columns) -> PromptSource:
    """Open a dataset and check its first row, so that a wrong file is refused at once.

    Raises:
        DataError: naming the file (and row and column) that is not what the recipe declares.
    """
    if (settings.path is None) == (settings.generator is None):
        raise DataError("a dataset needs either a path or a generator, set one of them")
    source = _file(settings.path, columns) if settings.path is not None else _generated(settings, columns)
    if settings.limit is not None:
        source = _First(source, settings.limit)
    if len(source) == 0:
        raise DataError(f"{settings.path or settings.generator} has no rows")
    source.row(0)
    return source


def _file(path: str, columns: Columns) -> PromptSource:
    file = Path(path)
    if not file.is_file():
        raise DataError(f"there is no data file {path}")
    if file.suffix not in _FILES:
        raise DataError(f"{path} is neither of {', '.join(_FILES)}, which are the formats that hflow reads")
    return _FILES[file.suffix](file, columns)


def _generated(settings: DataSettings, columns: Columns) -> PromptSource:
    name = str(settings.generator)
    if name not in _GENERATORS:
        raise DataError(
            f"there is no generator {name!r} (known: {', '.join(_GENERATORS)}){nearest(name, _GENERATORS)}"
        )
    return _GENERATORS[name](settings.split, columns)


class _First:
    """The first rows of a source."""

    def __init__(self, source: PromptSource, limit: int) -> None:
        self._source = source
        self._limit = limit

    def __len__(self) -> int:
        return min(self._limit, len(self._source))

    def row(self, index: int) -> dict[str, Any]:
        """Row `index` of the source."""
        return self._source.row(index)
