"""Rows of Parquet files. Values of Arrow become the JSON values that were written into them.

It is imported where there is such a file, as only this needs pyarrow.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hflow.base.cache import cache_directory
from hflow.base.errors import DataError
from hflow.data.rows.row_schema import RowSchema
from hflow.types import Unit

_IMAGE_ROWS = 64
"""Rows with images that are read at once."""
_BATCH_ROWS = (1 << 16, 1 << 10, 16, 1)
"""Rows of Parquet that are read at once. Fewer are tried where pyarrow cannot read so many."""


def json_value(value: Any, kind: pa.DataType) -> Any:
    """Return a value that pyarrow or `datasets` made of Arrow data, without the padding of structs.

    A struct of Arrow has the keys of all rows, and null for those that a row lacks. They are left out, at
    any depth, so that a row of Parquet is the row of JSON from which it was written. A map has only keys of
    its own, and becomes an object.
    """
    if value is None:
        return None
    if pa.types.is_map(kind):
        return {key: json_value(item, kind.item_type) for key, item in dict(value).items()}
    if pa.types.is_struct(kind) and isinstance(value, dict):
        present = [field for field in kind if value.get(field.name) is not None]
        return {field.name: json_value(value[field.name], field.type) for field in present}
    if _is_list(kind) and isinstance(value, list):
        return [json_value(item, kind.value_type) for item in value]
    return value


def _is_list(kind: pa.DataType) -> bool:
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
    return any(test(kind) for test in tests) or pa.types.is_large_list_view(kind)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what pyarrow raises for a file into a `DataError`."""
    try:
        yield
    except pa.ArrowNotImplementedError as error:
        raise DataError(
            f"{path} has Parquet that pyarrow cannot read: {error}; write it otherwise"
        ) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path} cannot be read as Parquet: {reason}; restore the file") from error


class Parquet:
    """Rows of a Parquet file.

    The declared columns are kept in memory as Arrow arrays. With images among them they are a file of the
    cache, which the processes of a machine map.
    """

    def __init__(self, path: Path, schema: RowSchema) -> None:
        """Read the declared columns.

        Raises:
            DataError: if the file is not a Parquet file or lacks a declared column.
        """
        self._path = path
        self._schema = schema
        schema.check(_column_names(path), str(path))
        has_images = bool({Unit.IMAGE, Unit.IMAGES} & {*schema.units.values()})
        with _readable(path):
            columns = schema.source_columns
            self._table = _mapped_columns(path, columns) if has_images else _read_columns(path, columns)

    @staticmethod
    def check_columns(path: Path, schema: RowSchema) -> None:
        """Check the first row of a file. Raises as the constructor, and as `row`."""
        schema.check(_column_names(path), str(path))
        with _readable(path), pq.ParquetFile(path, memory_map=True) as file:
            batch = next(file.iter_batches(1, columns=schema.source_columns), None)
        if batch is not None and batch.num_rows:
            schema.row(plain_row(batch, 0), f"{path} row 0")

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
            row = plain_row(self._table, index)
        except (pa.ArrowException, ValueError) as error:
            raise DataError(f"{self.where(index)} cannot be read: {error}; restore the file") from error
        return self._schema.row(row, self.where(index))

    def where(self, index: int) -> str:
        """Return the name of a row in errors."""
        return f"{self._path} row {index}"


def _column_names(path: Path) -> list[str]:
    with _readable(path):
        return list(pq.read_schema(path).names)


def _read_columns(path: Path, columns: Sequence[str]) -> pa.Table:
    """Return columns of a file. A row group with more than 2 GiB of nested text is read in smaller batches.

    pyarrow cannot return such a row group at once, as it cannot split the array of a nested column.
    """
    with pq.ParquetFile(path, memory_map=True) as file:
        for num_rows in _BATCH_ROWS:
            try:
                batches = list(file.iter_batches(num_rows, columns=columns))
                table = pa.Table.from_batches(batches) if batches else file.schema_arrow.empty_table()
                return table.select(columns)  # for a name with dots it also reads the fields of a column
            except pa.ArrowNotImplementedError:
                if num_rows == _BATCH_ROWS[-1]:
                    raise
    raise AssertionError("there is a last number of rows")


def _mapped_columns(path: Path, columns: Sequence[str]) -> pa.Table:
    """Return columns of a file that was written once as Arrow, uncompressed, so that its memory is mapped."""
    about = path.stat()
    key = f"{path.resolve()} {about.st_mtime_ns} {about.st_size} {list(columns)}"
    directory = cache_directory() / "rows"
    file = directory / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.arrow"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        with pq.ParquetFile(path, memory_map=True) as source:
            schema = pa.schema([source.schema_arrow.field(name) for name in columns])
            with pa.ipc.new_file(unfinished, schema) as written:
                for batch in source.iter_batches(_IMAGE_ROWS, columns=columns):
                    written.write_batch(batch.select(columns))
        os.replace(unfinished, file)
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def plain_row(rows: pa.Table | pa.RecordBatch, index: int) -> dict[str, Any]:
    """Return a row of Arrow data, as Python values."""
    return {
        field.name: json_value(column[index].as_py(), field.type)
        for field, column in zip(rows.schema, rows.columns, strict=True)
    }
