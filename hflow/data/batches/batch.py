"""`Batch`: packed fields of some samples, as numpy arrays that cross processes without a copy.

A sample's tokens are consecutive and nothing is padded. Numbers have the precision with which they were
made: Python's floats are float64 and its integers int64, until a batch-level body gets them as a tensor.

Axes: S samples, T packed tokens, K entries of one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hflow.base.errors import RunError
from hflow.types import Unit

Values = npt.NDArray[Any] | list[Any]

_EXACT = 2**53
"""Float64 holds every integer up to this one."""


@dataclass(frozen=True)
class Column:
    """One field of a batch.

    `values` is `[T]` or `[T, K]` for TOKEN, and `[S]` for SEQUENCE and GROUP, where a group's value is
    repeated on its members. For the units of objects, such as TEXT, it is a list of S of them. Records that
    differ in their number of bytes are an array of `bytes` objects.
    """

    unit: Unit
    values: Values

    @property
    def nbytes(self) -> int:
        """Bytes of the values: of texts in UTF-8, and of each image once."""
        if isinstance(self.values, np.ndarray):
            return sum(map(len, self.values)) if self.values.dtype == object else self.values.nbytes
        if self.unit is Unit.PIXELS:
            images = {placed.image.digest: placed.image for images in self.values for placed in images}
            return sum(image.nbytes for image in images.values())
        return sum(len(str(value).encode()) for value in self.values)


@dataclass(frozen=True)
class Batch:
    """S samples with their token counts and fields, in the order of `samples`."""

    samples: npt.NDArray[np.int64]
    """Sample ids `[S]`."""
    groups: npt.NDArray[np.int64]
    """Group id of each sample `[S]`."""
    lengths: npt.NDArray[np.int64]
    """Number of tokens of each sample `[S]`."""
    columns: dict[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.lengths.sum())

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """int64 `[S + 1]`: sample s is tokens `offsets[s]:offsets[s + 1]`."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for column in self.columns.values())

    def take(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """Return the samples at these rows, in this order."""
        rows = np.asarray(rows, dtype=np.int64)
        lengths = self.lengths[rows]
        tokens = _token_rows(self.offsets[rows], lengths)
        columns = {
            name: Column(c.unit, _take(c, tokens if c.unit is Unit.TOKEN else rows))
            for name, c in self.columns.items()
        }
        return Batch(self.samples[rows], self.groups[rows], lengths, columns)

    def select(self, names: Iterable[str]) -> Batch:
        """Return a batch with only these columns."""
        columns = {name: self.columns[name] for name in names}
        return Batch(self.samples, self.groups, self.lengths, columns)

    def with_columns(self, columns: dict[str, Column]) -> Batch:
        """Return a batch with these columns added or replaced."""
        return Batch(self.samples, self.groups, self.lengths, {**self.columns, **columns})

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """Concatenate batches that have the same columns."""
        assert batches, "no batches to concatenate"
        if len(batches) == 1:
            return batches[0]
        columns = {
            name: Column(c.unit, _concat(name, [batch.columns[name].values for batch in batches]))
            for name, c in batches[0].columns.items()
        }
        return cls(
            np.concatenate([batch.samples for batch in batches]),
            np.concatenate([batch.groups for batch in batches]),
            np.concatenate([batch.lengths for batch in batches]),
            columns,
        )


def _token_rows(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the indices of the tokens of samples that start at `starts`."""
    shifts = starts - np.concatenate(([0], np.cumsum(lengths)[:-1])) if len(starts) else starts
    rows: npt.NDArray[np.int64] = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(shifts, lengths)
    return rows


def _take(column: Column, rows: npt.NDArray[np.int64]) -> Values:
    if isinstance(column.values, np.ndarray):
        return column.values[rows]
    return [column.values[row] for row in rows]


def _concat(field: str, values: list[Values]) -> Values:
    arrays = [part for part in values if isinstance(part, np.ndarray)]
    return join_arrays(field, arrays) if arrays else [value for part in values for value in part]


def number_array(field: str, numbers: list[Any], dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """Return Python numbers of a field as an array: bool, int64 or, if one of them is a float, float64.

    Raises:
        RunError: if that would change an integer.
    """
    array = np.array(numbers, dtype=dtype)
    if dtype is None and array.dtype.kind == "f" and (np.abs(array) >= _EXACT).any():
        _check_exact(field, [n for n in numbers if isinstance(n, int | np.integer)])
    return array if len(array) or dtype is not None else array.astype(np.float32)


def join_arrays(field: str, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate arrays of a field.

    Raises:
        RunError: if integers that are joined with floats would change.
    """
    joined: npt.NDArray[Any] = np.concatenate([array for array in arrays if len(array)] or arrays[:1])
    if joined.dtype.kind == "f":
        for array in arrays:
            if array.dtype.kind in "iu" and len(array):
                _check_exact(field, [int(array.min()), int(array.max())])
    return joined


def _check_exact(field: str, integers: list[Any]) -> None:
    """Refuse integers that float64 cannot hold."""
    if changed := [n for n in integers if abs(int(n)) > _EXACT]:
        raise RunError(
            f"{field!r} has integers, such as {changed[0]}, and floats, which together are stored as float64 "
            "and would change the integer. Return only integers, or the integer as a text"
        )
