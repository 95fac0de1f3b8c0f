"""`DataLocations`: which workers hold which fields of which samples, in columns with a row per sample."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hflow.data_plane.redistribute import NO_WORKER, FieldHolders, Holders, Integers, Moves

NO_ROW = -1


@dataclass(eq=False)
class _Held:
    """Fields that were always copied together, and where they are, of samples that were copied."""

    is_made: bool
    """Whether batch nodes make them: a sample's home worker does not hold them by itself."""
    workers: NDArray[np.int32]
    """[most copies of a sample, rows]: all workers that hold them, then `NO_WORKER`. Not the home worker,
    unless a batch node made them there."""

    def add(self, rows: Integers, workers: Integers) -> None:
        """Note one more worker for each of these rows, of which some may be there again with another one."""
        while True:
            is_new = (self.workers[:, rows] != workers).all(axis=0)
            rows, workers = rows[is_new], workers[is_new]
            if not len(rows):
                return
            counts = (self.workers[:, rows] != NO_WORKER).sum(axis=0)
            if counts.max() == len(self.workers):
                self.workers = np.pad(self.workers, ((0, 1), (0, 0)), constant_values=NO_WORKER)
            self.workers[counts, rows] = workers  # of several for a row, one; the others are new again


class DataLocations:
    """The workers that hold the data of one root stream's samples.

    All that a source or a sample-level or group-level body makes is stored on the sample's home worker. What
    batch nodes make, and what is moved, is noted once for all fields that move together: each further move
    and node then costs the controller the same.
    """

    def __init__(self) -> None:
        self._rows = np.empty(0, np.int32)
        """Sample, less `_first` -> its row in all columns; `NO_ROW`: it is not here."""
        self._first = 0
        self._free: list[int] = []
        """Rows without a sample."""
        self._home = np.empty(0, np.int32)
        self._length = np.empty(0, np.int64)
        self._held: dict[str, _Held] = {}
        """Field -> where it is besides the home worker, if it was ever copied, or made by a batch node."""

    def add_sample(self, sample: int, worker: int, length: int) -> None:
        """Record that a source finished a sample of `length` tokens on its home worker."""
        if not 0 <= sample - self._first < len(self._rows):
            self._widen(sample)
        if not self._free:
            self._grow()
        if (row := self._rows[sample - self._first]) == NO_ROW:
            row = self._rows[sample - self._first] = self._free.pop()
        self._home[row], self._length[row] = worker, length

    def add_outputs(self, fields: Iterable[str], samples: Iterable[int], workers: int | Integers) -> None:
        """Record that a batch node made these fields of these samples on a worker, or on one for each."""
        self._add(fields, samples, workers, is_made=True)

    def add_copies(self, fields: Iterable[str], samples: Iterable[int], workers: int | Integers) -> None:
        """Record that one more worker has these fields of these samples, or one for each."""
        self._add(fields, samples, workers, is_made=False)

    def add_moves(self, moves: Moves) -> None:
        """Record that moves are done; the sources keep their copies."""
        for kind, fields in enumerate(moves.fields):
            is_of_kind = moves.kind == kind
            self.add_copies(fields, moves.samples[is_of_kind], moves.dst[is_of_kind])

    def lengths(self, samples: Iterable[int]) -> list[int]:
        """Return the tokens of each sample."""
        lengths: list[int] = self._length[self._rows_of(samples)].tolist()
        return lengths

    def holders(self, fields: Iterable[str], samples: Iterable[int]) -> Holders:
        """Return the workers that hold fields of these samples."""
        ids = np.sort(as_ids(samples))
        rows = self._rows_of(ids)
        home = self._home[None, rows]
        names: dict[_Held | None, list[str]] = defaultdict(list)
        for name in fields:
            names[self._held.get(name)].append(name)
        groups = []
        for held, members in names.items():
            copies = home[:0] if held is None else held.workers[:, rows]
            is_made = held is not None and held.is_made
            workers = copies if is_made else np.concatenate((home, copies))
            groups.append(FieldHolders(tuple(members), workers))
        return Holders(ids, self._length[rows], tuple(groups))

    def workers_of(self, samples: Iterable[int]) -> dict[int, list[int]]:
        """Return the workers that may hold any data of these samples, each with those samples, ascending."""
        return self._by_worker(self._known(samples), self._all_held())

    def by_home(self, samples: Iterable[int]) -> dict[int, list[int]]:
        """Group samples by their home worker."""
        samples = tuple(samples)
        groups: dict[int, list[int]] = {}
        for sample, home in zip(samples, self._home[self._rows_of(samples)].tolist(), strict=True):
            groups.setdefault(home, []).append(sample)
        return groups

    def at_home(self, worker: int) -> set[int]:
        """Return the samples whose home worker this is."""
        samples = self._all_samples()
        return set(samples[self._home[self._rows_of(samples)] == worker].tolist())

    def drop_fields(self, fields: Iterable[str], samples: Iterable[int]) -> dict[int, list[int]]:
        """Forget fields of these samples; return the workers that may hold them, each with its samples."""
        known = self._known(samples)
        dropped = self._together(self._held.keys() & set(fields), is_made=False)
        workers = self._by_worker(known, dropped)
        for held in dropped:
            held.workers[:, self._rows_of(known)] = NO_WORKER
        return workers

    def forget(self, samples: Iterable[int]) -> None:
        """Forget all data of these samples."""
        known = self._known(samples)
        rows = self._rows_of(known)
        for held in self._all_held():
            held.workers[:, rows] = NO_WORKER
        self._rows[known - self._first] = NO_ROW
        self._free += rows.tolist()

    def _add(
        self, fields: Iterable[str], samples: Iterable[int], workers: int | Integers, *, is_made: bool
    ) -> None:
        rows = self._rows_of(samples)
        workers = np.broadcast_to(workers, rows.shape)
        is_away = self._home[rows] != workers
        for held in self._together(fields, is_made=is_made):
            held.add(*((rows, workers) if held.is_made else (rows[is_away], workers[is_away])))

    def _rows_of(self, samples: Iterable[int]) -> Integers:
        rows = self._rows[as_ids(samples) - self._first]
        assert (rows != NO_ROW).all(), "there is no data of a sample"
        return rows

    def _known(self, samples: Iterable[int]) -> Integers:
        """Return those of some samples that are here, ascending."""
        ids = np.unique(as_ids(samples))
        ids = ids[(ids >= self._first) & (ids < self._first + len(self._rows))]
        known: Integers = ids[self._rows[ids - self._first] != NO_ROW]
        return known

    def _all_samples(self) -> Integers:
        return np.flatnonzero(self._rows != NO_ROW) + self._first

    def _widen(self, sample: int) -> None:
        """Let the table of rows begin before the first sample, and end after the last one."""
        samples = self._all_samples()
        rows = self._rows_of(samples)
        covered = np.append(samples, sample)
        first, last = int(covered.min()), int(covered.max())
        margin = max(64, last - first)  # so that this is rare, and older samples may follow
        self._first = max(0, first - margin)
        self._rows = np.full(last + 1 + margin - self._first, NO_ROW, np.int32)
        self._rows[samples - self._first] = rows

    def _all_held(self) -> list[_Held]:
        return list(dict.fromkeys(self._held.values()))

    def _grow(self) -> None:
        """Double the number of rows."""
        num_rows = len(self._home)
        added = max(64, num_rows)
        self._free.extend(range(num_rows, num_rows + added))
        self._home, self._length = np.pad(self._home, (0, added)), np.pad(self._length, (0, added))
        for held in self._all_held():
            held.workers = np.pad(held.workers, ((0, 0), (0, added)), constant_values=NO_WORKER)

    def _together(self, fields: Iterable[str], *, is_made: bool) -> list[_Held]:
        """Return the places of these fields and of no others. `is_made` is that of fields not known yet."""
        fields = frozenset(fields)
        for held in dict.fromkeys(self._held[name] for name in fields if name in self._held):
            members = {name for name, other in self._held.items() if other is held}
            if not members <= fields:
                apart = _Held(held.is_made, held.workers.copy())
                self._held.update(dict.fromkeys(members & fields, apart))
        if new := fields - self._held.keys():
            nowhere = np.full((0, len(self._home)), NO_WORKER, np.int32)
            self._held.update(dict.fromkeys(new, _Held(is_made, nowhere)))
        return list(dict.fromkeys(self._held[name] for name in fields))

    def _by_worker(self, samples: Integers, places: Iterable[_Held]) -> dict[int, list[int]]:
        """Return home workers and other holders, each with the samples that it holds, ascending."""
        rows = self._rows_of(samples)
        workers = np.concatenate((self._home[None, rows], *(held.workers[:, rows] for held in places)))
        place, number = np.nonzero(workers != NO_WORKER)
        held = np.sort(workers[place, number].astype(np.int64) * len(samples) + number)
        held = held[np.diff(held, prepend=-1) != 0]
        found, starts = np.unique(held // max(1, len(samples)), return_index=True)
        parts = np.split(samples[held % max(1, len(samples))], starts[1:])
        return {worker: part.tolist() for worker, part in zip(found.tolist(), parts, strict=False)}


def as_ids(samples: Iterable[int]) -> Integers:
    """Return samples as an array."""
    return samples if isinstance(samples, np.ndarray) else np.fromiter(samples, np.int64)
