"""Which workers hold which fields of which samples: all that the controller knows of data."""

from __future__ import annotations

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


class Holdings:
    """Where the samples of one root stream are.

    Everything that a source, a sample-level or a group-level body made stays on the sample's
    home; what batch nodes made, and what was moved, is recorded field by field.
    """

    def __init__(self) -> None:
        self._home: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._field: dict[str, dict[int, frozenset[int]]] = {}

    def arrive(self, sample: int, worker: int, length: int) -> None:
        """A source finished a sample on a worker."""
        self._home[sample] = worker
        self._length[sample] = length

    def made(self, fields: Iterable[str], samples: Iterable[int], worker: int) -> None:
        """A batch node left its fields of these samples on a worker."""
        self._add(fields, samples, worker, start_at_home=False)

    def moved(self, fields: Iterable[str], samples: Iterable[int], worker: int) -> None:
        """A worker pulled fields of these samples; the source keeps its copy."""
        self._add(fields, samples, worker, start_at_home=True)

    def _add(self, fields: Iterable[str], samples: Iterable[int], worker: int, start_at_home: bool) -> None:
        samples = tuple(samples)
        one = frozenset((worker,))
        for name in fields:
            at = self._field.setdefault(name, {})
            for sample in samples:
                before = at.get(sample)
                if before is None and start_at_home:
                    before = frozenset((self._home[sample],))
                at[sample] = one if before is None else before | one

    def lengths(self, samples: Sequence[int]) -> dict[int, int]:
        """Tokens of each sample."""
        return {sample: self._length[sample] for sample in samples}

    def of(self, fields: Iterable[str], samples: Sequence[int]) -> dict[str, Mapping[int, frozenset[int]]]:
        """Field -> sample -> workers that hold it."""
        homes = {sample: frozenset((self._home[sample],)) for sample in samples}
        return {
            name: {sample: at.get(sample, homes[sample]) for sample in samples}
            if (at := self._field.get(name))
            else homes
            for name in fields
        }

    def workers(self, samples: Iterable[int]) -> dict[int, list[int]]:
        """Workers that may hold anything of these samples -> those samples."""
        found: dict[int, list[int]] = {}
        for sample in samples:
            at = {self._home[sample]} if sample in self._home else set()
            for owners in self._field.values():
                at |= owners.get(sample, frozenset())
            for worker in at:
                found.setdefault(worker, []).append(sample)
        return found

    def home_of(self, samples: Iterable[int]) -> dict[int, list[int]]:
        """Home worker -> its samples."""
        found: dict[int, list[int]] = {}
        for sample in samples:
            found.setdefault(self._home[sample], []).append(sample)
        return found

    def drop(self, fields: Iterable[str], samples: Iterable[int]) -> dict[int, list[int]]:
        """Forget fields of these samples; returns the workers that may hold them -> those samples."""
        samples = tuple(samples)
        found = self.home_of(samples)
        for name in fields:
            for sample, owners in self._field.pop(name, {}).items():
                for worker in owners:
                    found.setdefault(worker, []).append(sample)
        return {worker: sorted(set(held)) for worker, held in found.items()}

    def forget(self, samples: Iterable[int]) -> None:
        """These samples' data is gone."""
        for sample in samples:
            self._home.pop(sample, None)
            self._length.pop(sample, None)
            for at in self._field.values():
                at.pop(sample, None)
