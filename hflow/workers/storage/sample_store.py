"""`SampleStore`: the samples that one worker holds, by stream, field and sample.

It holds what the worker's nodes produced and what was moved to the worker, until the controller
releases it. Streams that derive from a root stream share its sample ids. Threads of sources, body
callbacks and the device use the store at the same time, so a lock guards it; arrays are packed outside
the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from hflow.data.batches.batch import Batch
from hflow.graph.ir import TRAJECTORY_FIELDS
from hflow.types import Trajectory, Unit
from hflow.workers.storage.field_column import Cell, FieldColumn, PackedValues

_ATTRIBUTES = tuple(name for name in TRAJECTORY_FIELDS if name not in ("messages", "group"))
"""Fields that are stored as the trajectory's attribute of the same name."""
_attributes_of = attrgetter(*_ATTRIBUTES)


@dataclass(frozen=True)
class StoredStream:
    """What a store holds of some samples of a stream. Its values are the store's own."""

    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Sample -> its number of tokens and its group."""
    fields: dict[str, tuple[Unit, dict[int, Cell]]] = field(default_factory=dict)
    """Field -> its unit, and where the values of the samples that have it are."""


class SampleStore:
    """Fields of samples. Reading a missing sample or field is a bug of the plan, not of the user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._columns: dict[str, dict[str, FieldColumn]] = {}
        """Stream -> field -> its values."""
        self._shapes: dict[str, dict[int, tuple[int, int]]] = {}
        """Stream -> sample -> its number of tokens and its group."""
        self._trajectory_columns: dict[str, list[FieldColumn]] = {}
        """Stream -> the columns of `_ATTRIBUTES`, messages and group; cached for `put_trajectory`."""

    # Writing

    def put(self, stream: str, batch: Batch) -> None:
        """Store a batch's columns as fields of a stream."""
        samples = batch.samples.tolist()
        with self._lock:
            shapes = zip(batch.lengths.tolist(), batch.groups.tolist(), strict=True)
            self._shapes.setdefault(stream, {}).update(zip(samples, shapes, strict=True))
            self._put_columns(stream, batch, samples)

    def put_trajectory(
        self,
        stream: str,
        sample: int,
        group: int,
        trajectory: Trajectory,
        columns: Mapping[str, tuple[Unit, Any]],
        parent: str | None = None,
    ) -> None:
        """Store a sample that a source made, with the values of its dataset row. Nothing is packed yet.

        A sample that derives from one of the stream `parent` is dropped if that one was released meanwhile.
        """
        with self._lock:
            if parent is not None and not self._has_samples(parent, (sample,)):
                return
            self._shapes.setdefault(stream, {})[sample] = (len(trajectory.input_ids), group)
            values = (*_attributes_of(trajectory), list(trajectory.messages), group)
            for column, value in zip(self._columns_of_trajectory(stream), values, strict=True):
                column.put_loose(sample, value)
            for name, (unit, value) in columns.items():
                self._get_or_create(stream, name, unit).put_loose(sample, value)

    def add(self, stream: str, batch: Batch) -> None:
        """Store further fields of samples, except of samples that were released meanwhile."""
        samples = batch.samples.tolist()
        with self._lock:
            if not self._has_samples(stream, samples):
                shapes = self._shapes.get(stream, {})
                batch = batch.take([row for row, sample in enumerate(samples) if sample in shapes])
                samples = batch.samples.tolist()
            self._put_columns(stream, batch, samples)

    def add_value(self, stream: str, field: str, unit: Unit, samples: Sequence[int], value: Any) -> None:
        """Store one Python value for all of these samples, unless one of them was released meanwhile."""
        with self._lock:
            if self._has_samples(stream, samples):
                column = self._get_or_create(stream, field, unit)
                for sample in samples:
                    column.put_loose(sample, value)

    def add_metrics(
        self, stream: str, node: str, samples: Sequence[int], metrics: Mapping[str, float]
    ) -> None:
        """Store the metrics that a body reported for samples, as fields named `NODE.METRIC`.

        `summarize` averages them over the batch, like any numeric field.
        """
        for name, value in metrics.items():
            self.add_value(stream, f"{node}.{name}", Unit.SEQUENCE, samples, float(value))

    def _put_columns(self, stream: str, batch: Batch, samples: list[int]) -> None:
        for name, column in batch.columns.items():
            offsets = batch.offsets if column.unit is Unit.TOKEN else None
            packed = PackedValues(column.values, offsets)
            self._get_or_create(stream, name, column.unit).put_packed(samples, packed)

    def _columns_of_trajectory(self, stream: str) -> list[FieldColumn]:
        columns = self._trajectory_columns.get(stream)
        if columns is None:
            names = (*_ATTRIBUTES, "messages", "group")
            columns = [self._get_or_create(stream, name, TRAJECTORY_FIELDS[name]) for name in names]
            self._trajectory_columns[stream] = columns
        return columns

    def _get_or_create(self, stream: str, field: str, unit: Unit) -> FieldColumn:
        fields = self._columns.setdefault(stream, {})
        column = fields.get(field)
        if column is None:
            column = fields[field] = FieldColumn(field, unit)
        assert column.unit is unit, f"{stream}/{field} is {column.unit}, not {unit}"
        return column

    def put_stored(self, stream: str, stored: StoredStream) -> None:
        """Store what `stored` returned, of this or another store."""
        with self._lock:
            self._shapes.setdefault(stream, {}).update(stored.shapes)
            for name, (unit, cells) in stored.fields.items():
                self._get_or_create(stream, name, unit).put_cells(cells)

    # Reading

    def stored(self, stream: str, samples: Sequence[int]) -> StoredStream:
        """Return everything that is held of those samples of a stream that are held. Nothing is packed."""
        with self._lock:
            shapes = self._shapes.get(stream, {})
            fields = {
                name: (column.unit, cells)
                for name, column in self._columns.get(stream, {}).items()
                if (cells := column.held_cells(samples))
            }
            return StoredStream({s: shapes[s] for s in samples if s in shapes}, fields)

    def gather(self, stream: str, fields: Iterable[str], samples: Sequence[int]) -> Batch:
        """Pack fields of samples, in this order, as a batch with the token counts and groups of `stream`.

        The batch has the fields of `stream` under their plain names; those of another stream join by sample
        and keep the full name, `stream/field`.
        """
        batch = self.gather_if_present(stream, fields, samples)
        assert batch is not None, f"samples of {stream} are read that this worker does not hold"
        return batch

    def gather_if_present(self, stream: str, fields: Iterable[str], samples: Sequence[int]) -> Batch | None:
        """Like `gather`, but return None when one of the samples was released."""
        with self._lock:
            if not self._has_samples(stream, samples):
                return None
            shapes = [self._shapes[stream][sample] for sample in samples]
            if not samples:  # a rank without samples may not have seen the fields yet
                fields = [name for name in fields if self._has_field(name)]
            columns = {name.removeprefix(f"{stream}/"): self._column(name) for name in fields}
            cells = {name: column.cells(samples) for name, column in columns.items()}
        lengths, groups = np.array(shapes, dtype=np.int64).reshape(-1, 2).T.copy()
        packed = {name: column.pack(cells[name]) for name, column in columns.items()}
        return Batch(np.array(samples, dtype=np.int64), groups, lengths, packed)

    def values(self, stream: str, field: str, samples: Sequence[int]) -> list[Any]:
        """Return the Python value of a field for each sample."""
        return self._column(f"{stream}/{field}").values(samples)

    def has(self, stream: str, field: str, sample: int) -> bool:
        """Return whether this worker holds a field of a sample."""
        column = self._columns.get(stream, {}).get(field)
        return column is not None and sample in column

    def has_any(self, stream: str, samples: Iterable[int]) -> bool:
        """Return whether this worker holds any of these samples of a stream."""
        with self._lock:
            shapes = self._shapes.get(stream, {})
            return any(sample in shapes for sample in samples)

    def lengths(self, stream: str, samples: Sequence[int]) -> list[int]:
        """Return the number of tokens of each sample of a stream."""
        return [self._shapes[stream][sample][0] for sample in samples]

    def group(self, stream: str, sample: int) -> int:
        """Return the group id of a sample."""
        return self._shapes[stream][sample][1]

    def _number_columns(self, streams: Iterable[str]) -> list[tuple[str, FieldColumn]]:
        """Return the numeric fields that are not per token, by `stream/field`."""
        with self._lock:
            return [
                (f"{stream}/{field}", column)
                for stream in streams
                for field, column in self._columns.get(stream, {}).items()
                if column.unit in (Unit.SEQUENCE, Unit.GROUP) and field != "group"
            ]

    def numbers(
        self, stream: str, streams: Iterable[str], samples: Sequence[int]
    ) -> dict[int, dict[str, float]]:
        """Return sample -> its numbers that are not per token, as far as it has them.

        Fields of `stream` have their plain names; others are named `stream/field`.
        """
        numbers: dict[int, dict[str, float]] = {sample: {} for sample in samples}
        for name, column in self._number_columns(streams):
            present = [sample for sample in samples if sample in column]
            for sample, value in zip(present, column.values(present), strict=True):
                numbers[sample][name.removeprefix(f"{stream}/")] = float(value)
        return numbers

    def summarize(self, streams: Iterable[str], samples: Sequence[int]) -> dict[str, tuple[float, int]]:
        """Return sum and count of the numeric PerSequence and PerGroup fields, by `stream/field`.

        Samples that lack a field are left out of its sum and count. The sum of `stream/truncated` is the
        number of samples that reached their limit of tokens.
        """
        streams = tuple(streams)
        sums: dict[str, tuple[float, int]] = {}
        for name, column in self._number_columns(streams):
            present = [sample for sample in samples if sample in column]
            if present:
                sums[name] = (float(np.sum(column.column(present).values, dtype=np.float64)), len(present))
        with self._lock:
            stop_reasons = [(stream, self._columns.get(stream, {}).get("stop_reason")) for stream in streams]
        for stream, reasons in stop_reasons:
            present = [] if reasons is None else [sample for sample in samples if sample in reasons]
            if reasons is not None and present:
                num_truncated = sum(reason == "length" for reason in reasons.values(present))
                sums[f"{stream}/truncated"] = (float(num_truncated), len(present))
        return sums

    def num_values(self) -> int:
        """Return the number of values held, over all streams and fields."""
        with self._lock:
            return sum(len(column) for fields in self._columns.values() for column in fields.values())

    def _has_samples(self, stream: str, samples: Sequence[int]) -> bool:
        shapes = self._shapes.get(stream, {})
        return all(sample in shapes for sample in samples)

    def _has_field(self, name: str) -> bool:
        stream, _, field = name.partition("/")
        return field in self._columns.get(stream, {})

    def _column(self, name: str) -> FieldColumn:
        stream, _, field = name.partition("/")
        return self._columns[stream][field]

    # Releasing

    def release(self, samples: Sequence[int], streams: Iterable[str]) -> None:
        """Free everything of these samples in these streams."""
        with self._lock:
            for stream in streams:
                shapes = self._shapes.get(stream, {})
                for sample in samples:
                    shapes.pop(sample, None)
                for column in self._columns.get(stream, {}).values():
                    column.drop(samples)

    def release_fields(self, samples: Sequence[int], fields: Iterable[str]) -> None:
        """Free `stream/field` names of the samples that have them; their token counts remain."""
        with self._lock:
            for name in fields:
                stream, _, field = name.partition("/")
                if column := self._columns.get(stream, {}).get(field):
                    column.drop(samples)


PackedSamples = Mapping[str, Batch]
"""Stream -> the moved fields of its samples."""
SampleRequest = tuple[tuple[int, ...], tuple[str, ...]]
"""Samples, and the `stream/field` names that are wanted of them."""


def pack(store: SampleStore, samples: Sequence[int], fields: Iterable[str]) -> PackedSamples:
    """Pack `stream/field` names of samples, stream by stream."""
    by_stream: dict[str, list[str]] = {}
    for name in fields:
        by_stream.setdefault(name.partition("/")[0], []).append(name)
    return {stream: store.gather(stream, names, samples) for stream, names in by_stream.items()}


def unpack(store: SampleStore, packed: PackedSamples) -> int:
    """Put packed samples into a store and return their bytes."""
    for stream, batch in packed.items():
        store.put(stream, batch)
    return sum(batch.nbytes for batch in packed.values())
