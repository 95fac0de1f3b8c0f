"""`Batch`: packed fields of some samples, in numpy, so that they cross processes without a copy.

A sample's tokens are consecutive; there is no padding anywhere. Integer fields stay integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hflow.types import Unit

Values = npt.NDArray[Any] | list[Any]


@dataclass(frozen=True)
class Column:
    """One field of a batch.

    `values` is `[T]` or `[T, K]` for TOKEN, `[S]` for SEQUENCE and GROUP (a group's value is
    repeated on its members while it travels), and a list of S objects for TEXT and JSON.
    """

    unit: Unit
    values: Values

    @property
    def nbytes(self) -> int:
        """Bytes of the values (texts: their UTF-8 length)."""
        if isinstance(self.values, np.ndarray):
            return self.values.nbytes
        return sum(len(str(value).encode()) for value in self.values)


@dataclass(frozen=True)
class Batch:
    """S samples with their token counts and fields. Rows are in the order of `samples`."""

    samples: npt.NDArray[np.int64]
    """Sample ids `[S]`."""
    groups: npt.NDArray[np.int64]
    """Group id of each sample `[S]`."""
    lengths: npt.NDArray[np.int64]
    """Tokens of each sample `[S]`."""
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
        """The samples at these rows, in this order."""
        rows = np.asarray(rows, dtype=np.int64)
        lengths = self.lengths[rows]
        tokens = _token_rows(self.offsets[rows], lengths)
        columns = {
            name: Column(c.unit, _take(c, tokens if c.unit is Unit.TOKEN else rows))
            for name, c in self.columns.items()
        }
        return Batch(self.samples[rows], self.groups[rows], lengths, columns)

    def select(self, names: Iterable[str]) -> Batch:
        """Only these columns."""
        columns = {name: self.columns[name] for name in names}
        return Batch(self.samples, self.groups, self.lengths, columns)

    def with_columns(self, columns: dict[str, Column]) -> Batch:
        """These columns added (or replaced)."""
        return Batch(self.samples, self.groups, self.lengths, {**self.columns, **columns})

    @classmethod
    def concat(cls, parts: Sequence[Batch]) -> Batch:
        """Join batches that have the same columns."""
        assert parts, "nothing to join"
        if len(parts) == 1:
            return parts[0]
        columns = {
            name: Column(c.unit, _join([part.columns[name].values for part in parts]))
            for name, c in parts[0].columns.items()
        }
        return cls(
            np.concatenate([part.samples for part in parts]),
            np.concatenate([part.groups for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            columns,
        )


def _token_rows(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Indices of the tokens of samples that start at `starts`."""
    shifts = starts - np.concatenate(([0], np.cumsum(lengths)[:-1])) if len(starts) else starts
    return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(shifts, lengths)


def _take(column: Column, rows: npt.NDArray[np.int64]) -> Values:
    if isinstance(column.values, np.ndarray):
        return column.values[rows]
    return [column.values[row] for row in rows]


def _join(values: list[Values]) -> Values:
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    return [value for part in values for value in part]
