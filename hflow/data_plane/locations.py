"""`DataLocations`: which workers hold which fields of which samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hflow.data_plane.redistribute import Move


@dataclass(frozen=True)
class _Copy:
    """Fields of samples that a worker holds, other than what these samples' home workers hold."""

    worker: int
    fields: frozenset[str]
    samples: frozenset[int]


class DataLocations:
    """The workers that hold the data of one root stream's samples.

    All that a source or a sample-level or group-level body makes is stored on the sample's home worker. What
    batch nodes make, and what is moved, is recorded as copies of many samples at once: one entry a sample
    and field would make a step expensive for the controller.
    """

    def __init__(self) -> None:
        self._home: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._copies: list[_Copy] = []
        self._batch_fields: set[str] = set()
        """Fields that batch nodes make: the home worker does not hold them by itself."""
        self._singletons: dict[int, frozenset[int]] = {}
        """Worker -> the set with this worker only, shared to save memory."""

    def add_sample(self, sample: int, worker: int, length: int) -> None:
        """Record that a source finished a sample of `length` tokens on its home worker."""
        self._home[sample] = worker
        self._length[sample] = length

    def add_outputs(self, fields: Iterable[str], samples: Iterable[int], worker: int) -> None:
        """Record that a batch node made these fields of these samples on a worker."""
        fields = tuple(fields)
        self._batch_fields.update(fields)
        self.add_copies(fields, samples, worker)

    def add_copies(self, fields: Iterable[str], samples: Iterable[int], worker: int) -> None:
        """Record that one more worker has these fields of these samples."""
        self._copies.append(_Copy(worker, frozenset(fields), frozenset(samples)))

    def add_moves(self, moves: Iterable[Move]) -> None:
        """Record that moves are done; the sources keep their copies."""
        pulled: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
        for move in moves:
            pulled[move.dst, move.fields] += move.samples
        for (worker, fields), samples in pulled.items():
            self.add_copies(fields, samples, worker)

    def lengths(self, samples: Sequence[int]) -> dict[int, int]:
        """Return the tokens of each sample."""
        return {sample: self._length[sample] for sample in samples}

    def holders(
        self, fields: Iterable[str], samples: Sequence[int]
    ) -> dict[str, Mapping[int, frozenset[int]]]:
        """Return field -> sample -> workers that hold it. Fields with the same holders share one mapping."""
        homes = {sample: self._singleton(self._home[sample]) for sample in samples}
        copies = self._copies_of(frozenset(samples))
        known: dict[tuple[bool, tuple[int, ...]], Mapping[int, frozenset[int]]] = {}
        holders: dict[str, Mapping[int, frozenset[int]]] = {}
        for name in fields:
            field_copies = [copy for copy in copies if name in copy.fields]
            is_at_home = name not in self._batch_fields or not field_copies
            key = (is_at_home, tuple(map(id, field_copies)))
            if key not in known:
                known[key] = self._with_copies(homes if is_at_home else {}, field_copies)
            holders[name] = known[key]
        return holders

    def workers_of(self, samples: Iterable[int]) -> dict[int, list[int]]:
        """Return the workers that may hold any data of these samples, each with those samples, ascending."""
        samples = frozenset(samples)
        return self._by_worker(samples, self._copies_of(samples))

    def by_home(self, samples: Iterable[int]) -> dict[int, list[int]]:
        """Group samples by their home worker."""
        groups: dict[int, list[int]] = {}
        for sample in samples:
            groups.setdefault(self._home[sample], []).append(sample)
        return groups

    def at_home(self, worker: int) -> set[int]:
        """Return the samples whose home worker this is."""
        return {sample for sample, home in self._home.items() if home == worker}

    def drop_fields(self, fields: Iterable[str], samples: Iterable[int]) -> dict[int, list[int]]:
        """Forget fields of these samples; return the workers that may hold them, each with its samples."""
        fields, samples = frozenset(fields), frozenset(samples)
        workers = self._by_worker(
            samples, [copy for copy in self._copies_of(samples) if copy.fields & fields]
        )
        self._forget_copies(fields, samples)
        return workers

    def forget(self, samples: Iterable[int]) -> None:
        """Forget all data of these samples."""
        samples = frozenset(samples)
        for sample in samples:
            self._home.pop(sample, None)
            self._length.pop(sample, None)
        self._forget_copies(None, samples)

    def _singleton(self, worker: int) -> frozenset[int]:
        if worker not in self._singletons:
            self._singletons[worker] = frozenset((worker,))
        return self._singletons[worker]

    def _copies_of(self, samples: frozenset[int]) -> list[_Copy]:
        return [copy for copy in self._copies if not copy.samples.isdisjoint(samples)]

    def _with_copies(
        self, holders: Mapping[int, frozenset[int]], copies: Iterable[_Copy]
    ) -> Mapping[int, frozenset[int]]:
        """Return the holders of a field when these copies are added."""
        extended = dict(holders)
        for copy in copies:
            worker = self._singleton(copy.worker)
            for sample in copy.samples:
                before = extended.get(sample)
                extended[sample] = worker if before is None else before | worker
        return extended

    def _by_worker(self, samples: frozenset[int], copies: Iterable[_Copy]) -> dict[int, list[int]]:
        """Return home workers and owners of copies, each with the samples that it holds, ascending."""
        workers: dict[int, set[int]] = defaultdict(set)
        for sample in samples:
            if (home := self._home.get(sample)) is not None:
                workers[home].add(sample)
        for copy in copies:
            workers[copy.worker] |= copy.samples & samples
        return {worker: sorted(ids) for worker, ids in workers.items()}

    def _forget_copies(self, fields: frozenset[str] | None, samples: frozenset[int]) -> None:
        """Remove these fields from the copies of these samples; None removes all fields."""
        copies: list[_Copy] = []
        for copy in self._copies:
            if copy.samples.isdisjoint(samples) or (fields is not None and copy.fields.isdisjoint(fields)):
                copies.append(copy)
                continue
            if other_samples := copy.samples - samples:
                copies.append(_Copy(copy.worker, copy.fields, other_samples))
            if fields is not None and (other_fields := copy.fields - fields):
                copies.append(_Copy(copy.worker, other_fields, copy.samples & samples))
        self._copies = copies
