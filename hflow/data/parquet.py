"""Rows of a Parquet file; the declared columns are held in memory, in Arrow's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hflow.data.columns import Columns, check_names, checked
from hflow.errors import DataError


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
