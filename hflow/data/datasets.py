"""Datasets: rows by index, with the columns that a recipe declares."""

from __future__ import annotations

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
from hflow.data.row_schema import RowSchema, check_columns, checked_row
from hflow.errors import DataError, nearest
from hflow.json_text import parse_json

MAX_ROW_BYTES = 1 << 26
"""The longest row that is read. A text of this length has more tokens than any model takes."""


@dataclass(frozen=True)
class DataSettings:
    """Settings of a dataset: a file, or the name of a generator."""

    path: str | None = None
    """A `.jsonl` or `.parquet` file."""
    generator: str | None = None
    """`addition` or `addition-pairs`."""
    split: str = "train"
    """The split of a generator."""
    shuffle: bool = True
    """Whether each epoch has a new random order (see `RowOrder`)."""
    limit: int | None = None
    """Number of rows to use, from the beginning; None uses all."""


class RowSource(Protocol):
    """Rows by index."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Return the declared columns of row `index`.

        Raises:
            DataError: if the row does not have them.
        """
        ...


def open_dataset(settings: DataSettings, columns: RowSchema) -> RowSource:
    """Open a dataset and check its first row, so that a wrong file fails at once.

    Raises:
        DataError: if the dataset does not exist, is empty or lacks a declared column; names file, row and
            column.
    """
    if (settings.path is None) == (settings.generator is None):
        raise DataError("a dataset needs either a path or a generator; set one of them")
    if settings.path is not None:
        source = _open_file(settings.path, columns)
    else:
        source = _open_generator(settings, columns)
    if settings.limit is not None:
        source = _FirstRows(source, settings.limit)
    if len(source) == 0:
        raise DataError(
            f"{settings.path or settings.generator} has no rows; add some, or use another dataset"
        )
    source.row(0)
    return source


def _open_file(path: str, columns: RowSchema) -> RowSource:
    file = Path(path)
    if not file.is_file():
        raise DataError(f"there is no data file {path}; set the dataset's path to an existing file")
    if file.suffix not in _FILES:
        raise DataError(
            f"{path} has none of the formats that hflow reads: {', '.join(_FILES)}; convert it to one"
        )
    return _FILES[file.suffix](file, columns)


def _open_generator(settings: DataSettings, columns: RowSchema) -> RowSource:
    name = str(settings.generator)
    if name not in _GENERATORS:
        raise DataError(
            f"there is no generator {name!r} (known: {', '.join(_GENERATORS)}){nearest(name, _GENERATORS)}"
        )
    return _GENERATORS[name](settings.split, columns)


class JsonLines:
    """Rows of a JSON Lines file, parsed when they are read. Blank lines are skipped."""

    _CHUNK_BYTES = 1 << 26
    _SHORTEST_ROW = 2
    """Bytes of `{}`. A shorter line is blank."""

    def __init__(self, path: Path, columns: RowSchema) -> None:
        self._path = path
        self._columns = columns
        self._file = path.open("rb")
        self._starts, self._ends = self._find_lines(self._file.fileno(), path.stat().st_size)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`, counted from 0 without blank lines.

        Raises:
            DataError: if the line is not a JSON object or lacks a declared column.
        """
        where = f"{self._path} row {index}"
        start, end = int(self._starts[index]), int(self._ends[index])
        if end - start > MAX_ROW_BYTES:
            raise DataError(
                f"{where} has {end - start:,} bytes; rows have at most {MAX_ROW_BYTES:,}. Write one object "
                "per line."
            )
        line = os.pread(self._file.fileno(), end - start, start)
        try:
            value = parse_json(line)
        except ValueError as error:
            raise DataError(f"{where} is not JSON ({error}); write one object per line") from error
        if not isinstance(value, dict):
            raise DataError(f"{where} is a {type(value).__name__}; write one JSON object per line")
        return checked_row(value, self._columns, where)

    @classmethod
    def _find_lines(cls, descriptor: int, size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the byte ranges of the lines that can hold a row."""
        if size == 0:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        step = cls._CHUNK_BYTES
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
            breaks = [
                start + np.flatnonzero(np.frombuffer(content[start : start + step], np.uint8) == ord("\n"))
                for start in range(0, size, step)
            ]
            ends = np.concatenate([*breaks, [size]]).astype(np.int64)
            starts = np.concatenate(([0], ends[:-1] + 1))
        is_row = ends - starts >= cls._SHORTEST_ROW
        return starts[is_row], ends[is_row]


class Parquet:
    """Rows of a Parquet file. The declared columns are kept in memory as Arrow arrays."""

    def __init__(self, path: Path, columns: RowSchema) -> None:
        """Read the declared columns.

        Raises:
            DataError: if the file is not a Parquet file or lacks a declared column.
        """
        self._path = path
        self._columns = columns
        try:
            names = pq.read_schema(path).names
            check_columns(names, columns, str(path))
            self._table = pq.read_table(path, columns=list(columns), memory_map=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"{path} cannot be read as Parquet: {reason}; restore the file") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`.

        Raises:
            DataError: if a value does not have its column's declared type, or cannot be read.
        """
        try:
            row = {name: self._table[name][index].as_py() for name in self._columns}
        except (pa.ArrowException, ValueError) as error:
            raise DataError(f"{self._path} row {index} cannot be read: {error}; restore the file") from error
        return checked_row(row, self._columns, f"{self._path} row {index}")


class _FirstRows:
    """The first rows of a source."""

    def __init__(self, source: RowSource, limit: int) -> None:
        self._source = source
        self._limit = limit

    def __len__(self) -> int:
        return min(self._limit, len(self._source))

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index` of the source."""
        return self._source.row(index)


_FILES: Mapping[str, Callable[[Path, RowSchema], RowSource]] = {
    ".jsonl": JsonLines,
    ".parquet": Parquet,
}
_GENERATORS: Mapping[str, Callable[[str, RowSchema], RowSource]] = {
    "addition": Addition,
    "addition-pairs": AdditionPairs,
}
