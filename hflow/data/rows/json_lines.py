"""Rows of JSON Lines files."""

from __future__ import annotations

import mmap
import os
from codecs import BOM_UTF8
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.base.errors import DataError
from hflow.base.json_text import parse_json
from hflow.data.rows.row_schema import RowSchema

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_ROW_BYTES = 1 << 26
"""The longest row that is read. A text of this length has more tokens than any model takes."""
_SPACES = b" \t\r"
_ONE_PER_LINE = (
    "write one JSON object per line, as `jq -c` does (`jq -c '.[]'` where the file is a list of the objects)"
)


class JsonLines:
    """Rows of a JSON Lines file, parsed when they are read. Lines of only spaces are skipped."""

    _CHUNK_BYTES = 1 << 26

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
        where = self.where(index)
        start, end = int(self._starts[index]), int(self._ends[index])
        if end - start > MAX_ROW_BYTES:
            raise DataError(
                f"{where} has {end - start:,} bytes; rows have at most {MAX_ROW_BYTES:,}. Write one object "
                "per line."
            )
        return _parsed(os.pread(self._file.fileno(), end - start, start), self._schema, where)

    def where(self, index: int) -> str:
        """Return the name of a row in errors."""
        return f"{self._path} row {index}"

    @staticmethod
    def check_columns(path: Path, schema: RowSchema) -> None:
        """Check the first row of a file.

        Raises:
            DataError: for the reasons of `row`, and if the file cannot be read.
        """
        try:
            with path.open("rb") as file:
                line = file.readline(MAX_ROW_BYTES + 1).removeprefix(BOM_UTF8) or b""
                while line.isspace():
                    line = file.readline(MAX_ROW_BYTES + 1)
        except OSError as error:
            raise _unreadable(path, schema, error) from error
        if 0 < len(line) <= MAX_ROW_BYTES:
            _parsed(line, schema, f"{path} row 0")

    @classmethod
    def _find_lines(cls, descriptor: int, size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the byte ranges of the lines that can hold a row."""
        import numpy as np  # not above: naming data, as most commands do, needs none

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
            starts[0] = len(BOM_UTF8) * (content[: len(BOM_UTF8)] == BOM_UTF8)
            is_row = ends > starts
            characters = np.frombuffer(content, np.uint8)
            begins_with_space = np.isin(characters[starts[is_row]], np.frombuffer(_SPACES, np.uint8))
            del characters  # or the file stays mapped
            for line in np.flatnonzero(is_row)[begins_with_space].tolist():
                is_row[line] = not content[starts[line] : ends[line]].isspace()
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
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 ({error.reason}); save the file as UTF-8") from error
    except JSONDecodeError as error:
        is_cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        problem = "the line ends before the value does" if is_cut else f"{error.msg} at character {error.pos}"
        raise DataError(f"{where} is not JSON ({problem}); {_ONE_PER_LINE}") from error
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}; correct the row") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} is a {type(value).__name__}; {_ONE_PER_LINE}")
    return schema.row(value, where)
