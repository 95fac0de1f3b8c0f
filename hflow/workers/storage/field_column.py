"""`FieldColumn`: the values of one field of one stream, by sample, packed only when they are read.

A value is either *loose* (a Python value, as a body or an episode made it) or a row of packed values (as a
batch node or another worker made it). A loose value costs one dict entry; rows of the same packed
values are selected together. The tokens of a long trajectory are packed when they come: as Python numbers
they take four times the memory, and each node that reads them would pack them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hflow.data.batches.batch import Column, Values, join_arrays, number_array
from hflow.types import Unit

Array = npt.NDArray[Any]

TOKEN_DTYPES: Mapping[str, type[np.generic]] = {
    "input_ids": np.int64,
    "loss_mask": np.bool_,
    "behav_logprobs": np.float32,
    "versions": np.int64,
}
"""Dtypes of a trajectory's per-token fields; other values take the dtype of their contents."""


LONG = 256
"""Tokens of a row from which on it is faster to copy row by row than token by token."""


class PackedValues(NamedTuple):
    """Packed values of one field; for TOKEN, row r is tokens `offsets[r]:offsets[r + 1]`."""

    values: Values
    offsets: npt.NDArray[np.int64] | None


Cell = tuple[PackedValues | None, Any]
"""Where a value is: packed values and a row number, or None and a loose value."""


class FieldColumn:
    """Values of one field by sample id."""

    def __init__(self, field: str, unit: Unit) -> None:
        self.field = field
        self.unit = unit
        self._cells: dict[int, Cell] = {}
        self._dtype = TOKEN_DTYPES.get(field) if unit is Unit.TOKEN else None

    def __contains__(self, sample: int) -> bool:
        return sample in self._cells

    def __len__(self) -> int:
        return len(self._cells)

    def put_packed(self, samples: Iterable[int], packed: PackedValues) -> None:
        """Set the value of the r-th sample to row r of packed values."""
        self._cells.update((sample, (packed, row)) for row, sample in enumerate(samples))

    def put_loose(self, sample: int, value: Any) -> None:
        """Set a Python value: a scalar, text or JSON, for TOKEN a sequence of numbers."""
        if self._dtype is not None and len(value) >= LONG and (row := _exact(value, self._dtype)) is not None:
            self._cells[sample] = (PackedValues(row, np.array((0, len(row)))), 0)
        else:
            self._cells[sample] = (None, value)

    def put_cells(self, cells: Mapping[int, Cell]) -> None:
        """Set the cells of samples."""
        self._cells.update(cells)

    def held_cells(self, samples: Iterable[int]) -> dict[int, Cell]:
        """Return the cells of those samples that the column has; later changes do not affect them."""
        return {sample: self._cells[sample] for sample in samples if sample in self._cells}

    def drop(self, samples: Iterable[int]) -> None:
        """Forget these samples. Packed values are freed with their last row."""
        for sample in samples:
            self._cells.pop(sample, None)

    def values(self, samples: Sequence[int]) -> list[Any]:
        """Return the Python value of each sample: scalars, texts, JSON, and lists for TOKEN."""
        return [self._value(*self._cells[sample]) for sample in samples]

    def _value(self, packed: PackedValues | None, row: Any) -> Any:
        if packed is None:
            return list(row) if self.unit is Unit.TOKEN else row
        if packed.offsets is not None:
            assert isinstance(packed.values, np.ndarray)
            return packed.values[packed.offsets[row] : packed.offsets[row + 1]].tolist()
        value = packed.values[row]
        return value.item() if isinstance(value, np.generic) else value

    def cells(self, samples: Sequence[int]) -> list[Cell]:
        """Return the cells of these samples, for `pack`; later changes of the column do not affect them."""
        return [self._cells[sample] for sample in samples]

    def column(self, samples: Sequence[int]) -> Column:
        """Pack the values of these samples in this order. The result is a copy, which may be changed."""
        return self.pack(self.cells(samples))

    def pack(self, cells: Sequence[Cell]) -> Column:
        """Pack the values of cells in this order. The result is a copy, which may be changed."""
        if self.unit is Unit.TOKEN and (spans := self._long_spans(cells)) is not None:
            return Column(self.unit, join_arrays(self.field, spans))
        positions_of: dict[int, list[int]] = {}
        for position, (packed, _) in enumerate(cells):
            positions_of.setdefault(id(packed), []).append(position)
        parts = [
            self._select(cells[positions[0]][0], [cells[p][1] for p in positions])
            for positions in positions_of.values()
        ]
        return Column(self.unit, self._merge(parts, list(positions_of.values())))

    def _long_spans(self, cells: Sequence[Cell]) -> list[Array] | None:
        """Return the tokens of each cell; None if none is long, or if loose values decide the dtype."""
        parts = {id(packed): packed for packed, _ in cells}
        if not any(map(_is_long, parts.values())) or (self._dtype is None and id(None) in parts):
            return None
        spans = []
        for packed, row in cells:
            if packed is None:
                spans.append(np.array(row, self._dtype))
            else:
                assert packed.offsets is not None
                spans.append(np.asarray(packed.values)[packed.offsets[row] : packed.offsets[row + 1]])
        return spans

    def _select(self, packed: PackedValues | None, rows: list[Any]) -> PackedValues:
        """Select rows of packed values; for None, `rows` are loose values, which are packed."""
        if packed is None:
            return _pack_loose(self.field, self.unit, rows)
        if isinstance(packed.values, list):
            return PackedValues([packed.values[row] for row in rows], None)
        index = np.asarray(rows, dtype=np.int64)
        if packed.offsets is None:
            return PackedValues(packed.values[index], None)
        lengths = np.diff(packed.offsets)[index]
        return PackedValues(_copy_spans(packed.values, packed.offsets[index], lengths), _offsets(lengths))

    def _merge(self, parts: list[PackedValues], positions: list[list[int]]) -> Values:
        """Join parts whose r-th row belongs at `positions[part][r]`."""
        if not parts:
            return [] if self.unit.is_object else np.zeros(0, np.float32)
        if len(parts) == 1:
            return parts[0].values
        order = np.argsort(np.asarray(list(chain.from_iterable(positions))))
        if isinstance(parts[0].values, list):
            joined = list(chain.from_iterable(part.values for part in parts))
            return [joined[i] for i in order]
        values = join_arrays(self.field, [np.asarray(part.values) for part in parts])
        if self.unit is not Unit.TOKEN:
            return values[order]
        lengths = np.concatenate([np.diff(part.offsets) for part in parts if part.offsets is not None])
        return _copy_spans(values, _offsets(lengths)[:-1][order], lengths[order])


def _is_long(packed: PackedValues | None) -> bool:
    """Return whether the rows of packed values have many tokens, on average."""
    if packed is None or packed.offsets is None:
        return False
    return bool(packed.offsets[-1] >= LONG * max(1, len(packed.offsets) - 1))


def _exact(values: Sequence[Any], dtype: type[np.generic]) -> Array | None:
    """Return numbers as an array; None if they are not the same in this dtype."""
    array = np.asarray(values)
    packed = array.astype(dtype)
    return packed if np.array_equal(packed, array, equal_nan=array.dtype.kind == "f") else None


def _pack_loose(field: str, unit: Unit, values: list[Any]) -> PackedValues:
    if unit.is_object:
        return PackedValues(values, None)
    if unit is Unit.TOKEN:
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        tokens = number_array(field, list(chain.from_iterable(values)), TOKEN_DTYPES.get(field))
        return PackedValues(tokens, _offsets(lengths))
    return PackedValues(number_array(field, values), None)


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))


def _copy_spans(values: Array, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Array:
    """Copy spans of `values` one after the other; as one slice where they are contiguous."""
    if len(starts) and np.array_equal(starts[1:], (starts + lengths)[:-1]):
        return values[starts[0] : starts[-1] + lengths[-1]].copy()
    index = np.repeat(starts - _offsets(lengths)[:-1], lengths)
    index += np.arange(len(index))
    return values[index]
