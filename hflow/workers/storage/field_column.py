"""`FieldColumn`: one field of one stream, sample by sample, packed only when somebody asks.

A value is *loose* (a Python value, as a body or an episode made it) or a row of a packed chunk
(as a batch node or another worker made it). Loose values cost one dict entry each; rows of one
chunk are taken together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hflow.data.batch import Column, Values
from hflow.types import Unit

Array = npt.NDArray[Any]

TOKEN_DTYPES: Mapping[str, type[np.generic]] = {
    "input_ids": np.int64,
    "loss_mask": np.bool_,
    "behav_logprobs": np.float32,
    "versions": np.int64,
}
"""What a trajectory's tuples are packed as; other values take the dtype of their contents."""


class PackedValues(NamedTuple):
    """Packed values of one field; for TOKEN, row r is tokens `offsets[r]:offsets[r + 1]`."""

    values: Values
    offsets: npt.NDArray[np.int64] | None


Cell = tuple[PackedValues | None, Any]
"""A row of a chunk, or None and a loose value."""


class FieldColumn:
    """Values of one field by sample id."""

    def __init__(self, field: str, unit: Unit) -> None:
        self.field = field
        self.unit = unit
        self._cells: dict[int, Cell] = {}

    def __contains__(self, sample: int) -> bool:
        return sample in self._cells

    def __len__(self) -> int:
        return len(self._cells)

    def put(self, samples: Iterable[int], chunk: PackedValues) -> None:
        """Take row r of a chunk as the value of the r-th sample."""
        self._cells.update((sample, (chunk, row)) for row, sample in enumerate(samples))

    def put_loose(self, sample: int, value: Any) -> None:
        """Take a Python value: a scalar, text or JSON, for TOKEN a sequence of numbers."""
        self._cells[sample] = (None, value)

    def drop(self, samples: Iterable[int]) -> None:
        """Forget these samples; a chunk is freed with its last row."""
        for sample in samples:
            self._cells.pop(sample, None)

    def values(self, samples: Sequence[int]) -> list[Any]:
        """The Python value of each sample: scalars, texts, JSON, and lists for TOKEN."""
        return [self._value(*self._cells[sample]) for sample in samples]

    def _value(self, chunk: PackedValues | None, row: Any) -> Any:
        if chunk is None:
            return list(row) if self.unit is Unit.TOKEN else row
        if chunk.offsets is not None:
            assert isinstance(chunk.values, np.ndarray)
            return chunk.values[chunk.offsets[row] : chunk.offsets[row + 1]].tolist()
        value = chunk.values[row]
        return value.item() if isinstance(value, np.generic) else value

    def cells(self, samples: Sequence[int]) -> list[Cell]:
        """What `pack` takes: where each sample's value is, whatever happens to the shelf after."""
        return [self._cells[sample] for sample in samples]

    def column(self, samples: Sequence[int]) -> Column:
        """Pack the values of these samples in this order. The result may be written to."""
        return self.pack(self.cells(samples))

    def pack(self, cells: Sequence[Cell]) -> Column:
        """Pack values in this order. The result may be written to."""
        rows_of: dict[int, list[int]] = {}
        for place, (chunk, _) in enumerate(cells):
            rows_of.setdefault(id(chunk), []).append(place)
        parts = [
            self._take(cells[places[0]][0], [cells[p][1] for p in places]) for places in rows_of.values()
        ]
        return Column(self.unit, self._merge(parts, list(rows_of.values())))

    def _take(self, chunk: PackedValues | None, rows: list[Any]) -> PackedValues:
        if chunk is None:
            return _pack_loose(self.field, self.unit, rows)
        if isinstance(chunk.values, list):
            return PackedValues([chunk.values[row] for row in rows], None)
        wanted = np.asarray(rows, dtype=np.int64)
        if chunk.offsets is None:
            return PackedValues(chunk.values[wanted], None)
        lengths = np.diff(chunk.offsets)[wanted]
        return PackedValues(_take_spans(chunk.values, chunk.offsets[wanted], lengths), _offsets(lengths))

    def _merge(self, parts: list[PackedValues], places: list[list[int]]) -> Values:
        """Join parts whose r-th row belongs at place `places[part][r]`."""
        if not parts:
            return [] if self.unit in (Unit.TEXT, Unit.JSON) else np.zeros(0, np.float32)
        if len(parts) == 1:
            return parts[0].values
        order = np.argsort(np.asarray(list(chain.from_iterable(places))))
        if isinstance(parts[0].values, list):
            joined = list(chain.from_iterable(part.values for part in parts))
            return [joined[i] for i in order]
        packed = np.concatenate([part.values for part in parts])
        if self.unit is not Unit.TOKEN:
            return packed[order]
        lengths = np.concatenate([np.diff(part.offsets) for part in parts if part.offsets is not None])
        return _take_spans(packed, _offsets(lengths)[:-1][order], lengths[order])


def _pack_loose(field: str, unit: Unit, values: list[Any]) -> PackedValues:
    if unit in (Unit.TEXT, Unit.JSON):
        return PackedValues(values, None)
    if unit is Unit.TOKEN:
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        return PackedValues(
            _numbers(list(chain.from_iterable(values)), TOKEN_DTYPES.get(field)), _offsets(lengths)
        )
    return PackedValues(_numbers(values, None), None)


def _numbers(values: list[Any], dtype: type[np.generic] | None) -> Array:
    """An array of Python numbers; floats become float32, integers and booleans stay."""
    array = np.array(values, dtype=dtype)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))


def _take_spans(values: Array, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Array:
    """Copy spans of `values` one after the other; a slice where they are already in a row."""
    if len(starts) and np.array_equal(starts[1:], (starts + lengths)[:-1]):
        return values[starts[0] : starts[-1] + lengths[-1]].copy()
    index = np.repeat(starts - _offsets(lengths)[:-1], lengths)
    index += np.arange(len(index))
    return values[index]
