"""Rows of a JSON Lines file, parsed when they are asked for."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hflow.data.columns import Columns, checked
from hflow.errors import DataError

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
