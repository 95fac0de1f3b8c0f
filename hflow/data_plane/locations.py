"""`DataLocations`: which workers hold which fields of which samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hflow.data_plane.redistribute import Move

_NO_WORKERS: frozenset[int] = frozenset()


@dataclass(eq=False)
class _Held:
    """Fields that were always copied together, and where they are, of samples that were copied."""

    is_made: bool
    """Whether batch nodes make them: a sample's home worker does not hold them by itself."""
    workers: dict[int, frozenset[int]]
    """Sample -> all workers that hold them."""


class DataLocations:
    """The workers that hold the data of one root stream's samples.

    All that a source or a sample-level or group-level body makes is stored on the sample's home worker. What
    batch nodes make, and what is moved, is noted once for all fields that move together, sample by sample:
    each further move and node then costs the controller the same.
    """

    def __init__(self) -> None:
        self._home: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._held: dict[str, _Held] = {}
        """Field -> where it is besides the home worker, if it was ever copied, or made by a batch node."""
        self._singletons: dict[int, frozenset[int]] = {}
        """Worker -> the set with this worker only, shared to save memory."""

    def add_sample(self, sample: int, worker: int, length: int) -> None:
        """Record that a source finished a sample of `length` tokens on its home worker."""
        self._home[sample] = worker
        self._length[sample] = length

    def add_outputs(self, fields: Iterable[str], samples: Iterable[int], worker: int) -> None:
        """Record that a batch node made these fields of these samples on a worker."""
        self._add(fields, samples, worker, is_made=True)

    def add_copies(self, fields: Iterable[str], samples: Iterable[int], worker: int) -> None:
        """Record that one more worker has these fields of these samples."""
        self._add(fields, samples, worker, is_made=False)

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
        known: dict[int, Mapping[int, frozenset[int]]] = {}
        holders: dict[str, Mapping[int, frozenset[int]]] = {}
        for name in fields:
            held = self._held.get(name)
            if held is None:
                holders[name] = homes
                continue
            if id(held) not in known:
                known[id(held)] = _with_homes(held, homes)
            holders[name] = known[id(held)]
        return holders

    def workers_of(self, samples: Iterable[int]) -> dict[int, list[int]]:
        """Return the workers that may hold any data of these samples, each with those samples, ascending."""
        return self._by_worker(samples, self._distinct(self._held.values()))

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
        samples = tuple(samples)
        dropped = self._together(self._held.keys() & set(fields), is_made=False)
        workers = self._by_worker(samples, dropped)
        for held in dropped:
            for sample in samples:
                held.workers.pop(sample, None)
        return workers

    def forget(self, samples: Iterable[int]) -> None:
        """Forget all data of these samples."""
        copies = [held.workers for held in self._distinct(self._held.values())]
        for sample in samples:
            self._home.pop(sample, None)
            self._length.pop(sample, None)
            for workers in copies:
                workers.pop(sample, None)

    def _add(self, fields: Iterable[str], samples: Iterable[int], worker: int, *, is_made: bool) -> None:
        own, samples = self._singleton(worker), tuple(samples)
        for held in self._together(fields, is_made=is_made):
            workers = held.workers
            for sample in samples:
                before = workers.get(sample)
                if before is None and not held.is_made and sample in self._home:
                    before = self._singleton(self._home[sample])
                workers[sample] = own if before is None else before | own

    def _together(self, fields: Iterable[str], *, is_made: bool) -> list[_Held]:
        """Return the places of these fields and of no others. `is_made` is that of fields not known yet."""
        fields = frozenset(fields)
        for held in self._distinct(map(self._held.get, fields)):
            members = {name for name, other in self._held.items() if other is held}
            if not members <= fields:
                apart = _Held(held.is_made, dict(held.workers))
                self._held.update(dict.fromkeys(members & fields, apart))
        if new := fields - self._held.keys():
            self._held.update(dict.fromkeys(new, _Held(is_made, {})))
        return self._distinct(map(self._held.get, fields))

    @staticmethod
    def _distinct(held: Iterable[_Held | None]) -> list[_Held]:
        return [one for one in dict.fromkeys(held) if one is not None]

    def _singleton(self, worker: int) -> frozenset[int]:
        if worker not in self._singletons:
            self._singletons[worker] = frozenset((worker,))
        return self._singletons[worker]

    def _by_worker(self, samples: Iterable[int], places: Iterable[_Held]) -> dict[int, list[int]]:
        """Return home workers and other holders, each with the samples that it holds, ascending."""
        found: dict[int, list[int]] = defaultdict(list)
        maps = [held.workers for held in places]
        for sample in sorted(samples):
            home = self._home.get(sample)
            workers = set() if home is None else {home}
            for place in maps:
                workers |= place.get(sample, _NO_WORKERS)
            for worker in workers:
                found[worker].append(sample)
        return dict(found)


def _with_homes(held: _Held, homes: Mapping[int, frozenset[int]]) -> Mapping[int, frozenset[int]]:
    """Return the holders of fields, of the samples in `homes`."""
    workers = held.workers
    if workers.keys().isdisjoint(homes):
        return homes
    if held.is_made:
        return {sample: workers[sample] for sample in homes if sample in workers}
    return {sample: workers.get(sample, home) for sample, home in homes.items()}
