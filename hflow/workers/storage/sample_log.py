"""`SampleLog`: a copy on disk of a worker's samples, for the process that takes the worker's place.

Invariant: what the controller learns of a sample is in the log before. So a worker that only generates can
fail at any moment: its samples are where the controller believes them to be once the log is restored.

Each write is a pair of files as in a checkpoint (`sample_files`), with what is new since the sample's last
write. The files survive the process, but need not survive the machine's power, so nothing waits for the disk.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from hflow.base.errors import RunError
from hflow.workers.storage.sample_files import SampleFiles, SampleFilesReader
from hflow.workers.storage.sample_store import SampleStore, StoredStream

SampleKey = tuple[str, int]
"""A root stream and a sample."""

_INCOMPLETE = "incomplete"
"""Name of a file that says which value the log lacks."""


class SampleLog:
    """Writes samples to numbered files, and removes a file when all its samples are released.

    `families` is root stream -> the streams with its samples' data: itself, those of the same source, and all
    that derive from them.
    """

    def __init__(self, directory: Path, store: SampleStore, families: Mapping[str, Sequence[str]]) -> None:
        self._directory = directory
        self._store = store
        self._families = families
        self._roots = {member: root for root, family in families.items() for member in family}
        self._lock = threading.Lock()
        self._number = 0
        self._written: dict[SampleKey, set[tuple[str, str]]] = defaultdict(set)
        """Sample -> stream and field of its values that are in the log."""
        self._files_of: dict[SampleKey, list[int]] = defaultdict(list)
        self._samples_of: dict[int, set[SampleKey]] = {}
        """Number of a file -> those of its samples that are not released."""
        directory.mkdir(parents=True, exist_ok=True)

    def root_of(self, stream: str) -> str:
        """Return the root stream whose samples a stream has data of."""
        return self._roots[stream]

    def add(self, samples: Mapping[str, Sequence[int]]) -> None:
        """Write what is new of samples, given by root stream.

        If the files cannot hold a value, the log is incomplete from then on, and cannot be restored.
        """
        with self._lock:
            new = {root: self._new_values(root, ids) for root, ids in samples.items()}
            self._number += 1
            files = SampleFiles(self._directory, str(self._number), new, {})
            if files.write():
                for root, family in new.items():
                    self._note(self._number, root, family)
            for lost in files.not_saved[:1]:
                (self._directory / _INCOMPLETE).write_text(f"{lost.sample} of {lost.source}: {lost.reason}")

    def release(self, root: str, samples: Sequence[int]) -> None:
        """Forget samples, and remove the files that have no others."""
        with self._lock:
            for sample in samples:
                self._written.pop((root, sample), None)
                for number in self._files_of.pop((root, sample), ()):
                    self._samples_of[number].discard((root, sample))
                    if not self._samples_of[number]:
                        del self._samples_of[number]
                        self._remove(number)

    def restore(self) -> dict[str, tuple[int, ...]]:
        """Put everything that is in the log into the store; returns the samples by root stream.

        Raises:
            RunError: when the log is incomplete, or a file is damaged, other than the last, which was being
                written.
        """
        with self._lock:
            if (incomplete := self._directory / _INCOMPLETE).exists():
                raise RunError(f"a sample of the worker was lost with it: {incomplete.read_text()}")
            numbers = sorted(int(path.stem) for path in self._directory.glob("*.json"))
            for number in numbers:
                try:
                    streams = SampleFilesReader(self._directory, str(number)).all_samples()
                except RunError:
                    if number != numbers[-1]:
                        raise
                    self._remove(number)
                    break
                for stream, stored in streams.items():
                    self._store.put_stored(stream, stored)
                    self._note(number, self._roots[stream], {stream: stored})
            self._number = max(numbers, default=0)
            restored: dict[str, list[int]] = defaultdict(list)
            for root, sample in self._files_of:
                restored[root].append(sample)
            return {root: tuple(ids) for root, ids in restored.items()}

    def _new_values(self, root: str, samples: Sequence[int]) -> dict[str, StoredStream]:
        """Return the fields that the store holds of samples and the log does not."""
        family: dict[str, StoredStream] = {}
        for stream in self._families[root]:
            stored = self._store.stored(stream, samples)
            fields = {
                name: (unit, {s: x for s, x in cells.items() if (stream, name) not in self._written[root, s]})
                for name, (unit, cells) in stored.fields.items()
            }
            fields = {name: field for name, field in fields.items() if field[1]}
            has_new = {sample for _, cells in fields.values() for sample in cells}
            shapes = {s: shape for s, shape in stored.shapes.items() if s in has_new}
            family[stream] = StoredStream(shapes, fields)
        return family

    def _note(self, number: int, root: str, family: Mapping[str, StoredStream]) -> None:
        """Note what a file has."""
        known = self._samples_of.setdefault(number, set())
        for stream, stored in family.items():
            for sample in stored.shapes:
                if (root, sample) not in known:
                    known.add((root, sample))
                    self._files_of[root, sample].append(number)
            for name, (_, cells) in stored.fields.items():
                for sample in cells:
                    self._written[root, sample].add((stream, name))

    def _remove(self, number: int) -> None:
        for ending in ("json", "safetensors"):
            (self._directory / f"{number}.{ending}").unlink(missing_ok=True)
