"""`Batch`: packed fields of some samples, as numpy arrays that cross processes without a copy.

A sample's tokens are consecutive and nothing is padded. Integer fields keep their dtype.

Axes: S samples, T packed tokens, K entries of one token.
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

    `values` is `[T]` or `[T, K]` for TOKEN, and `[S]` for SEQUENCE and GROUP, where a group's value is
    repeated on its members. For TEXT, MESSAGES and JSON it is a list of S objects.
    """

    unit: Unit
    values: Values

    @property
    def nbytes(self) -> int:
        """Bytes of the values; of texts, the length in UTF-8."""
        if isinstance(self.values, np.ndarray):
            return self.values.nbytes
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
            name: Column(c.unit, _concat([batch.columns[name].values for batch in batches]))
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


def _concat(values: list[Values]) -> Values:
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    return [value for part in values for value in part]
