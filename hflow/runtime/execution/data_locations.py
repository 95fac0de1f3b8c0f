"""Which workers hold which fields of which samples: all that the controller knows of data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepBatch:
    """The samples that a step is made of, ids ascending."""

    stream: str
    step: int
    samples: tuple[int, ...]
    groups: tuple[int, ...]
    """The distinct groups, ascending."""
    group_size: int

    def members(self) -> dict[int, list[int]]:
        """Group -> its samples."""
        found: dict[int, list[int]] = {group: [] for group in self.groups}
        for sample in self.samples:
            found[sample // self.group_size].append(sample)
        return found


@dataclass(frozen=True)
class _Copy:
    """What a worker holds besides the samples' homes, or in their place."""

    worker: int
    fields: frozenset[str]
    samples: frozenset[int]


class DataLocations:
    """Where the samples of one root stream are.

    Everything that a source, a sample-level or a group-level body made stays on the sample's
    home; what batch nodes made, and what was moved, is noted as copies of many samples at once.
    """

    def __init__(self) -> None:
        self._home: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._copies: list[_Copy] = []
        self._homeless: set[str] = set()
        """Fields that batch nodes make."""
        self._alone: dict[int, frozenset[int]] = {}
        """Worker -> the set of it alone."""

    def arrive(self, sample: int, worker: int, length: int) -> None:
        """A source finished a sample on a worker."""
        self._home[sample] = worker
        self._length[sample] = length

    def made(self, fields: Iterable[str], samples: Iterable[int], worker: int) -> None:
        """A batch node left its fields of these samples on a worker."""
        fields = tuple(fields)
        self._homeless.update(fields)
        self.moved(fields, samples, worker)

    def moved(self, fields: Iterable[str], samples: Iterable[int], worker: int) -> None:
        """A worker pulled fields of these samples; the source keeps its copy."""
        self._copies.append(_Copy(worker, frozenset(fields), frozenset(samples)))

    def lengths(self, samples: Sequence[int]) -> dict[int, int]:
        """Tokens of each sample."""
        return {sample: self._length[sample] for sample in samples}

    def of(self, fields: Iterable[str], samples: Sequence[int]) -> dict[str, Mapping[int, frozenset[int]]]:
        """Field -> sample -> workers that hold it. Fields that lie alike share one mapping."""
        homes = {sample: self._only(self._home[sample]) for sample in samples}
        copies = self._copies_of(frozenset(samples))
        alike: dict[tuple[bool, tuple[int, ...]], Mapping[int, frozenset[int]]] = {}
        found: dict[str, Mapping[int, frozenset[int]]] = {}
        for name in fields:
            own = [copy for copy in copies if name in copy.fields]
            at_home = name not in self._homeless or not own
            kind = (at_home, tuple(map(id, own)))
            if kind not in alike:
                alike[kind] = self._with_copies(homes if at_home else {}, own)
            found[name] = alike[kind]
        return found

    def workers(self, samples: Iterable[int]) -> dict[int, list[int]]:
        """Workers that may hold anything of these samples -> those samples."""
        samples = frozenset(samples)
        return self._held(samples, self._copies_of(samples))

    def home_of(self, samples: Iterable[int]) -> dict[int, list[int]]:
        """Home worker -> its samples."""
        found: dict[int, list[int]] = {}
        for sample in samples:
            found.setdefault(self._home[sample], []).append(sample)
        return found

    def drop(self, fields: Iterable[str], samples: Iterable[int]) -> dict[int, list[int]]:
        """Forget fields of these samples; returns the workers that may hold them -> those samples."""
        fields, samples = frozenset(fields), frozenset(samples)
        held = self._held(samples, [copy for copy in self._copies_of(samples) if copy.fields & fields])
        self._forget_copies(fields, samples)
        return held

    def forget(self, samples: Iterable[int]) -> None:
        """These samples' data is gone."""
        samples = frozenset(samples)
        for sample in samples:
            self._home.pop(sample, None)
            self._length.pop(sample, None)
        self._forget_copies(None, samples)

    def _only(self, worker: int) -> frozenset[int]:
        if worker not in self._alone:
            self._alone[worker] = frozenset((worker,))
        return self._alone[worker]

    def _copies_of(self, samples: frozenset[int]) -> list[_Copy]:
        return [copy for copy in self._copies if not copy.samples.isdisjoint(samples)]

    def _with_copies(
        self, at: Mapping[int, frozenset[int]], copies: Iterable[_Copy]
    ) -> Mapping[int, frozenset[int]]:
        found = dict(at)
        for copy in copies:
            one = self._only(copy.worker)
            for sample in copy.samples:
                before = found.get(sample)
                found[sample] = one if before is None else before | one
        return found

    def _held(self, samples: frozenset[int], copies: Iterable[_Copy]) -> dict[int, list[int]]:
        """Homes and owners of copies -> which of these samples they hold, ascending."""
        found: dict[int, set[int]] = defaultdict(set)
        for sample in samples:
            if (home := self._home.get(sample)) is not None:
                found[home].add(sample)
        for copy in copies:
            found[copy.worker] |= copy.samples & samples
        return {worker: sorted(held) for worker, held in found.items()}

    def _forget_copies(self, fields: frozenset[str] | None, samples: frozenset[int]) -> None:
        """Copies of these samples lose these fields; None: all of them."""
        kept: list[_Copy] = []
        for copy in self._copies:
            if copy.samples.isdisjoint(samples) or (fields is not None and copy.fields.isdisjoint(fields)):
                kept.append(copy)
                continue
            if others := copy.samples - samples:
                kept.append(_Copy(copy.worker, copy.fields, others))
            if fields is not None and (left := copy.fields - fields):
                kept.append(_Copy(copy.worker, left, copy.samples & samples))
        self._copies = kept
