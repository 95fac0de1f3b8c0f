"""Rows of files: JSON Lines and Parquet."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hflow.data.row_schema import RowSchema
from hflow.errors import DataError
from hflow.json_text import parse_json

MAX_ROW_BYTES = 1 << 26
"""The longest row that is read. A text of this length has more tokens than any model takes."""


class JsonLines:
    """Rows of a JSON Lines file, parsed when they are read. Blank lines are skipped."""

    _CHUNK_BYTES = 1 << 26
    _SHORTEST_ROW = 2
    """Bytes of `{}`. A shorter line is blank."""

    def __init__(self, path: Path, schema: RowSchema) -> None:
        """Find the lines.

        Raises:
            DataError: if the file cannot be read.
        """
        self._path = path
        self._schema = schema
        try:
            self._file = path.open("rb")
            self._starts, self._ends = self._find_lines(self._file.fileno(), path.stat().st_size)
        except OSError as error:
            raise _unreadable(path, schema, error) from error

    @property
    def files(self) -> tuple[Path, ...]:
        """The file."""
        return (self._path,)

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
        return _parsed(os.pread(self._file.fileno(), end - start, start), self._schema, where)

    @classmethod
    def check_columns(cls, path: Path, schema: RowSchema) -> None:
        """Check the first row of a file.

        Raises:
            DataError: as `row`, and if the file cannot be read.
        """
        try:
            with path.open("rb") as file:
                line = b"\n"
                while line and len(line.removesuffix(b"\n")) < cls._SHORTEST_ROW:
                    line = file.readline(MAX_ROW_BYTES + 1)
        except OSError as error:
            raise _unreadable(path, schema, error) from error
        if 0 < len(line) <= MAX_ROW_BYTES:
            _parsed(line, schema, f"{path} row 0")

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


def _unreadable(path: Path, schema: RowSchema, error: OSError) -> DataError:
    reason = error.strerror or error
    return DataError(f"{path} cannot be read: {reason}; set {schema.key}.path to another file")


def _parsed(line: bytes, schema: RowSchema, where: str) -> dict[str, Any]:
    """Return the declared columns of a line.

    Raises:
        DataError: if the line is not a JSON object or lacks a declared column.
    """
    try:
        value = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}); write one object per line") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} is a {type(value).__name__}; write one JSON object per line")
    return schema.row(value, where)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what pyarrow raises for a file into a `DataError`."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path} cannot be read as Parquet: {reason}; restore the file") from error


class Parquet:
    """Rows of a Parquet file. The declared columns are kept in memory as Arrow arrays."""

    def __init__(self, path: Path, schema: RowSchema) -> None:
        """Read the declared columns.

        Raises:
            DataError: if the file is not a Parquet file or lacks a declared column.
        """
        self._path = path
        self._schema = schema
        self.check_columns(path, schema)
        with _readable(path):
            self._table = pq.read_table(path, columns=schema.source_columns, memory_map=True)

    @staticmethod
    def check_columns(path: Path, schema: RowSchema) -> None:
        """Check that a file has the declared columns. Raises as the constructor."""
        with _readable(path):
            names = pq.read_schema(path).names
        schema.check(names, str(path))

    @property
    def files(self) -> tuple[Path, ...]:
        """The file."""
        return (self._path,)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`.

        Raises:
            DataError: if a value does not have its column's declared type, or cannot be read.
        """
        try:
            row = {name: self._table[name][index].as_py() for name in self._schema.source_columns}
        except (pa.ArrowException, ValueError) as error:
            raise DataError(f"{self._path} row {index} cannot be read: {error}; restore the file") from error
        return self._schema.row(row, f"{self._path} row {index}")
