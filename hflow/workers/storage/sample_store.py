"""`SampleStore`: what one worker holds, by stream, field and sample.

It owns what the worker's nodes produced and what the plan moved here, until the controller
releases it. Streams that derive from a root share its sample ids. Sources, body callbacks and
the device thread use it at once, hence the lock; arrays are packed outside it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from hflow.data.batch import Batch
from hflow.data.unpack_returns import metric_value
from hflow.planner.ir import TRAJECTORY_FIELDS
from hflow.types import Trajectory, Unit
from hflow.workers.storage.field_column import FieldColumn, PackedValues

_ATTRIBUTES = tuple(name for name in TRAJECTORY_FIELDS if name not in ("messages", "group"))
"""Fields that are attributes of a trajectory as they are."""
_attributes_of = attrgetter(*_ATTRIBUTES)


class SampleStore:
    """Fields of samples. Missing samples and fields are bugs of the plan, not of the user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shelves: dict[str, dict[str, FieldColumn]] = {}
        self._shapes: dict[str, dict[int, tuple[int, int]]] = {}
        self._sources: dict[str, list[FieldColumn]] = {}
        """Stream -> the shelves of `_ATTRIBUTES`, messages and group, found once."""

    # ------------------------------------------------------------------------------- in
    def put(self, stream: str, batch: Batch) -> None:
        """Take a batch's columns as fields of a stream."""
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
        """Take a sample from a source, with the values of its dataset row. Nothing is packed yet.

        A view of a `parent` stream's sample is not taken when that was released meanwhile.
        """
        with self._lock:
            if parent is not None and not self._knows(parent, (sample,)):
                return
            self._shapes.setdefault(stream, {})[sample] = (len(trajectory.input_ids), group)
            values = (*_attributes_of(trajectory), list(trajectory.messages), group)
            for shelf, value in zip(self._source_shelves(stream), values, strict=True):
                shelf.put_loose(sample, value)
            for name, (unit, value) in columns.items():
                self._shelf(stream, name, unit).put_loose(sample, value)

    def add(self, stream: str, batch: Batch) -> None:
        """Take further fields of samples, but of those that were released while a body made them."""
        samples = batch.samples.tolist()
        with self._lock:
            if not self._knows(stream, samples):
                shapes = self._shapes.get(stream, {})
                batch = batch.take([row for row, sample in enumerate(samples) if sample in shapes])
                samples = batch.samples.tolist()
            self._put_columns(stream, batch, samples)

    def add_value(self, stream: str, field: str, unit: Unit, samples: Sequence[int], value: Any) -> None:
        """Like `add`, one Python value for all of these samples."""
        with self._lock:
            if self._knows(stream, samples):
                shelf = self._shelf(stream, field, unit)
                for sample in samples:
                    shelf.put_loose(sample, value)

    def add_metrics(self, stream: str, node: str, samples: Sequence[int], metrics: Mapping[str, Any]) -> None:
        """Store what a body reports beside its fields, as fields named `NODE.METRIC`.

        Raises:
            RunError: when a metric is not a number.
        """
        for name, value in metrics.items():
            self.add_value(stream, f"{node}.{name}", Unit.SEQUENCE, samples, metric_value(node, name, value))

    def _knows(self, stream: str, samples: Sequence[int]) -> bool:
        shapes = self._shapes.get(stream, {})
        return all(sample in shapes for sample in samples)

    def _put_columns(self, stream: str, batch: Batch, samples: list[int]) -> None:
        for name, column in batch.columns.items():
            offsets = batch.offsets if column.unit is Unit.TOKEN else None
            self._shelf(stream, name, column.unit).put(samples, PackedValues(column.values, offsets))

    def _source_shelves(self, stream: str) -> list[FieldColumn]:
        shelves = self._sources.get(stream)
        if shelves is None:
            names = (*_ATTRIBUTES, "messages", "group")
            shelves = [self._shelf(stream, name, TRAJECTORY_FIELDS[name]) for name in names]
            self._sources[stream] = shelves
        return shelves

    def _shelf(self, stream: str, field: str, unit: Unit) -> FieldColumn:
        fields = self._shelves.setdefault(stream, {})
        shelf = fields.get(field)
        if shelf is None:
            shelf = fields[field] = FieldColumn(field, unit)
        assert shelf.unit is unit, f"{stream}/{field} is {shelf.unit}, not {unit}"
        return shelf

    # ------------------------------------------------------------------------------ out
    def gather(self, stream: str, fields: Iterable[str], samples: Sequence[int]) -> Batch:
        """Pack fields of samples, in this order, as a batch of `stream`.

        Args:
            stream: the stream whose token counts and groups the batch has.
            fields: `stream/field` names. Columns bear the plain names of `stream`'s own fields;
                fields of another stream join by sample and keep their full name.
            samples: sample ids.
        """
        batch = self.gather_if_present(stream, fields, samples)
        assert batch is not None, f"samples of {stream} are read that this worker does not hold"
        return batch

    def gather_if_present(self, stream: str, fields: Iterable[str], samples: Sequence[int]) -> Batch | None:
        """Like `gather`, or None when one of the samples was released."""
        with self._lock:
            if not self._knows(stream, samples):
                return None
            shapes = [self._shapes[stream][sample] for sample in samples]
            if not samples:  # a rank without work may not have seen the fields yet
                fields = [name for name in fields if self._is_known(name)]
            shelves = {name.removeprefix(f"{stream}/"): self._find(name) for name in fields}
            cells = {name: shelf.cells(samples) for name, shelf in shelves.items()}
        lengths, groups = np.array(shapes, dtype=np.int64).reshape(-1, 2).T.copy()
        columns = {name: shelf.pack(cells[name]) for name, shelf in shelves.items()}
        return Batch(np.array(samples, dtype=np.int64), groups, lengths, columns)

    def values(self, stream: str, field: str, samples: Sequence[int]) -> list[Any]:
        """The Python value of a field for each sample."""
        return self._find(f"{stream}/{field}").values(samples)

    def has(self, stream: str, field: str, sample: int) -> bool:
        """Whether this worker holds a field of a sample."""
        shelf = self._shelves.get(stream, {}).get(field)
        return shelf is not None and sample in shelf

    def has_any(self, stream: str, samples: Iterable[int]) -> bool:
        """Whether this worker holds any of these samples of a stream."""
        with self._lock:
            shapes = self._shapes.get(stream, {})
            return any(sample in shapes for sample in samples)

    def lengths(self, stream: str, samples: Sequence[int]) -> list[int]:
        """Tokens of each sample of a stream."""
        return [self._shapes[stream][sample][0] for sample in samples]

    def group(self, stream: str, sample: int) -> int:
        """Group id of a sample."""
        return self._shapes[stream][sample][1]

    def _is_known(self, name: str) -> bool:
        stream, _, field = name.partition("/")
        return field in self._shelves.get(stream, {})

    def _find(self, name: str) -> FieldColumn:
        stream, _, field = name.partition("/")
        return self._shelves[stream][field]

    def summarize(self, streams: Iterable[str], samples: Sequence[int]) -> dict[str, tuple[float, int]]:
        """Sum and count of the numeric PerSequence and PerGroup fields of those samples that have them."""
        with self._lock:
            shelves = [
                (f"{stream}/{field}", shelf)
                for stream in streams
                for field, shelf in self._shelves.get(stream, {}).items()
                if shelf.unit in (Unit.SEQUENCE, Unit.GROUP) and field != "group"
            ]
        sums: dict[str, tuple[float, int]] = {}
        for name, shelf in shelves:
            held = [sample for sample in samples if sample in shelf]
            if held:
                sums[name] = (float(np.sum(shelf.column(held).values, dtype=np.float64)), len(held))
        return sums

    # ------------------------------------------------------------------------- forgetting
    def release(self, samples: Sequence[int], streams: Iterable[str]) -> None:
        """Free everything of these samples in these streams."""
        with self._lock:
            for stream in streams:
                shapes = self._shapes.get(stream, {})
                for sample in samples:
                    shapes.pop(sample, None)
                for shelf in self._shelves.get(stream, {}).values():
                    shelf.drop(samples)

    def release_fields(self, samples: Sequence[int], fields: Iterable[str]) -> None:
        """Free `stream/field` names of those samples that have them; their token counts stay known."""
        with self._lock:
            for name in fields:
                stream, _, field = name.partition("/")
                if shelf := self._shelves.get(stream, {}).get(field):
                    shelf.drop(samples)

    def num_values(self) -> int:
        """Values held, over all streams and fields."""
        with self._lock:
            return sum(len(shelf) for fields in self._shelves.values() for shelf in fields.values())
