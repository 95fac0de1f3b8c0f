"""`metrics.columns`: the numbers of `metrics.jsonl` in columns, so that a report need not parse a long run.

A block holds `BLOCK_ROWS` rows: a line of JSON, then float64 [metrics, rows], NaN where a row lacks a metric.
It has a checksum of itself and of the lines that it was made of, and is used if both are as they were. Other
lines are parsed. So the file may lag behind, be damaged or be deleted.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, overload
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from hflow.base.durable_files import replace_bytes
from hflow.runtime.saving.run_directory import metrics_row

BLOCK_ROWS = 100

Row = Mapping[str, float | None]
Columns = tuple[Sequence[str], NDArray[np.float64]]
"""Names of metrics, and their values [metrics, rows]."""


class Curve(Sequence[tuple[int, float]]):
    """The values of a metric: completed steps and a value for each, `[values]`, ascending."""

    def __init__(self, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        self._steps, self._values = steps, values

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> tuple[int, float]: ...
    @overload
    def __getitem__(self, index: slice) -> Curve: ...
    def __getitem__(self, index: int | slice) -> tuple[int, float] | Curve:
        if isinstance(index, slice):
            return Curve(self._steps[index], self._values[index])
        return int(self._steps[index]), float(self._values[index])

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._steps.tolist(), self._values.tolist(), strict=True)


class ColumnsWriter:
    """Adds the rows of a `metrics.jsonl`, which ends with a whole one, to its columns; old rows first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[Row] = []
        self._num_bytes, self._checksum = 0, 0
        with path.open("rb") as file:
            sizes = [size for _, size in _blocks(path, file)]
            if _file(path).is_file():
                os.truncate(_file(path), sum(sizes))
            for number, line in enumerate(file, len(sizes) * BLOCK_ROWS + 1):
                self.add(metrics_row(path, line, number), line)

    def add(self, row: Row, line: bytes) -> None:
        """Add a row, which is in the file as this line."""
        self._rows.append(row)
        self._num_bytes, self._checksum = self._num_bytes + len(line), crc32(line, self._checksum)
        if len(self._rows) == BLOCK_ROWS:
            names, values = _columns(self._rows)
            data = values.tobytes()
            about = {"bytes": self._num_bytes, "checksum": crc32(data, self._checksum), "names": names}
            with _file(self._path).open("ab") as file:
                file.write(json.dumps(about).encode() + b"\n" + data)
            self._rows, self._num_bytes, self._checksum = [], 0, 0


def read_curves(path: Path) -> dict[str, Curve]:
    """Return the curves of a `metrics.jsonl` by metric. Where a step was done twice, the later row counts.

    A last line without an end, which a run is writing or was killed in, is left out.

    Raises:
        ConfigError: for a line that is not a row; names it.
    """
    with path.open("rb") as file:
        parts = [columns for columns, _ in _blocks(path, file)]
        first = len(parts) * BLOCK_ROWS + 1
        *lines, _ = file.read().split(b"\n")
    parts.append(_columns([metrics_row(path, line, number) for number, line in enumerate(lines, first)]))
    found: dict[str, list[tuple[NDArray[np.float64], NDArray[np.float64]]]] = defaultdict(list)
    for names, same in groupby(parts, itemgetter(0)):
        values = np.concatenate([values for _, values in same], axis=1)
        steps = values[names.index("step")] if "step" in names else values
        for name, column in zip(names, values, strict=True):
            is_there = ~np.isnan(column)
            found[name].append((steps[is_there], column[is_there]))
    return {
        name: _curve(*map(np.concatenate, zip(*columns, strict=True)))
        for name, columns in sorted(found.items())
        if name != "step" and any(len(steps) for steps, _ in columns)
    }


def drop_rows_after(path: Path, step: int) -> None:
    """Remove the rows of more than `step` completed steps of a `metrics.jsonl`: the run takes them again.

    Raises:
        ConfigError: for a line that is not a row; names it.
        WriteError: when the file cannot be written.
    """
    with path.open("rb") as file:
        num_rows = place = 0
        for (names, values), _ in _blocks(path, file):
            if values[names.index("step")].max() > step:
                break
            num_rows, place = num_rows + BLOCK_ROWS, file.tell()
        file.seek(place)
        *lines, _ = file.read().split(b"\n")
        rows = (metrics_row(path, line, number) for number, line in enumerate(lines, num_rows + 1))
        kept = [line for line, row in zip(lines, rows, strict=True) if (row["step"] or 0) <= step]
        if len(kept) < len(lines):
            file.seek(0)
            replace_bytes(path, file.read(place) + b"".join(line + b"\n" for line in kept))


def _curve(steps: NDArray[np.float64], values: NDArray[np.float64]) -> Curve:
    order = np.argsort(steps, kind="stable")
    steps = steps[order].astype(np.int64)
    is_last = np.append(steps[1:] != steps[:-1], True)
    return Curve(steps[is_last], values[order][is_last])


def _columns(rows: Sequence[Row]) -> Columns:
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = [[math.nan if (value := row.get(name)) is None else value for row in rows] for name in names]
    return names, np.array(values, "<f8").reshape(len(names), len(rows))


def _blocks(path: Path, file: BinaryIO) -> Iterator[tuple[Columns, int]]:
    """Yield the blocks that fit the lines of an open `metrics.jsonl`, and their bytes. End after these."""
    if not _file(path).is_file():
        return
    with _file(path).open("rb") as source:
        while True:
            start, place = source.tell(), file.tell()
            try:
                about: Any = json.loads(source.readline())
                names, size = about["names"], about["bytes"]
                data = source.read(8 * BLOCK_ROWS * len(names))
                is_whole = crc32(data, crc32(file.read(size))) == about["checksum"]
            except (ValueError, LookupError, TypeError):
                is_whole = False
            if not is_whole:
                file.seek(place)
                return
            yield (names, np.frombuffer(data, "<f8").reshape(len(names), BLOCK_ROWS)), source.tell() - start


def _file(path: Path) -> Path:
    return path.with_suffix(".columns")
