"""Datasets: rows by number, of the columns that a recipe declares."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hflow.data.addition_task import Addition, AdditionPairs
from hflow.data.row_schema import Columns, check_names, checked
from hflow.errors import DataError, nearest

# -------------------- Rows of a JSON Lines file, parsed when they are asked for.


_CHUNK = 1 << 26
_SHORTEST_ROW = 2
"""Bytes of `{}`; a shorter line is blank."""


class JsonLines:
    """A file with one JSON object a line; blank lines are no rows."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self._path = path
        self._columns = columns
        self._file = path.open("rb")
        self._starts, self._ends = _lines(self._file.fileno(), path.stat().st_size)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`, counted from 0 without blank lines.

        Raises:
            DataError: when the line is no JSON object or lacks a declared column.
        """
        where = f"{self._path} row {index}"
        start, end = int(self._starts[index]), int(self._ends[index])
        line = os.pread(self._file.fileno(), end - start, start)
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is no JSON ({error}), write one object a line") from error
        if not isinstance(value, dict):
            raise DataError(f"{where} is a {type(value).__name__}, write one JSON object a line")
        return checked(value, self._columns, where)


def _lines(descriptor: int, size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Byte ranges of the lines that can hold a row."""
    if size == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
        breaks = [
            start + np.flatnonzero(np.frombuffer(content[start : start + _CHUNK], np.uint8) == ord("\n"))
            for start in range(0, size, _CHUNK)
        ]
        ends = np.concatenate([*breaks, [size]]).astype(np.int64)
        starts = np.concatenate(([0], ends[:-1] + 1))
    filled = ends - starts >= _SHORTEST_ROW
    return starts[filled], ends[filled]


# -------------------- Rows of a Parquet file; the declared columns are held in memory, in Arrow's form.


class Parquet:
    """One Parquet file."""

    def __init__(self, path: Path, columns: Columns) -> None:
        """Read the declared columns.

        Raises:
            DataError: when the file is no Parquet file or lacks a declared column.
        """
        self._path = path
        self._columns = columns
        try:
            names = pq.read_schema(path).names
            check_names(names, columns, str(path))
            self._table = pq.read_table(path, columns=list(columns), memory_map=True)
        except pa.ArrowInvalid as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`.

        Raises:
            DataError: when a value is not of its column's declared type.
        """
        row = {name: self._table[name][index].as_py() for name in self._columns}
        return checked(row, self._columns, f"{self._path} row {index}")


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


class RowSource(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """The declared columns of row `index`.

        Raises:
            DataError: when the row is not what the recipe declares.
        """
        ...


_FILES: Mapping[str, Callable[[Path, Columns], RowSource]] = {
    ".jsonl": JsonLines,
    ".parquet": Parquet,
}
_GENERATORS: Mapping[str, Callable[[str, Columns], RowSource]] = {
    "addition": Addition,
    "addition-pairs": AdditionPairs,
}


def open_dataset(settings: DataSettings, columns: Columns) -> RowSource:
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


def _file(path: str, columns: Columns) -> RowSource:
    file = Path(path)
    if not file.is_file():
        raise DataError(f"there is no data file {path}")
    if file.suffix not in _FILES:
        raise DataError(f"{path} is neither of {', '.join(_FILES)}, which are the formats that hflow reads")
    return _FILES[file.suffix](file, columns)


def _generated(settings: DataSettings, columns: Columns) -> RowSource:
    name = str(settings.generator)
    if name not in _GENERATORS:
        raise DataError(
            f"there is no generator {name!r} (known: {', '.join(_GENERATORS)}){nearest(name, _GENERATORS)}"
        )
    return _GENERATORS[name](settings.split, columns)


class _First:
    """The first rows of a source."""

    def __init__(self, source: RowSource, limit: int) -> None:
        self._source = source
        self._limit = limit

    def __len__(self) -> int:
        return min(self._limit, len(self._source))

    def row(self, index: int) -> dict[str, Any]:
        """Row `index` of the source."""
        return self._source.row(index)
