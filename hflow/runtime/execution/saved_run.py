"""`SavedRun`: what the controller stores in a checkpoint; workers store models and samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from hflow.errors import RunError
from hflow.runtime.state.snapshot import RunSnapshot, StreamSnapshot
from hflow.workers.interface import SampleReady

STATE_FILE = "state.json"
SAMPLES = "samples"
"""Subdirectory of a checkpoint with the data of samples."""


@dataclass(frozen=True)
class SavedRun:
    """The controller's part of a checkpoint."""

    snapshot: RunSnapshot
    ledger_position: int
    """The last `seq` of the ledger that belongs to the checkpoint."""
    node_states: Mapping[str, str]
    """Node -> JSON of its `State`."""
    samples: tuple[SampleReady, ...]
    """The finished samples of the snapshot, as their sources reported them."""
    files: tuple[tuple[str, int, str], ...]
    """(root stream, sample, name of the file that has its data or its journal)."""

    def without(self, samples: Iterable[tuple[str, int]]) -> SavedRun:
        """Return the same without the groups of some samples, given as (root stream, sample)."""
        lost = frozenset(samples)
        streams = tuple(_without(stream, lost) for stream in self.snapshot.streams)
        kept = {(s.stream, sample) for s in streams for sample in (*s.finished, *s.unfinished)}
        return replace(
            self,
            snapshot=replace(self.snapshot, streams=streams),
            samples=tuple(s for s in self.samples if (s.stream, s.sample) in kept),
            files=tuple(row for row in self.files if row[:2] in kept),
        )

    def write(self, directory: Path) -> None:
        """Write it into the directory of a checkpoint."""
        (directory / STATE_FILE).write_bytes(_ADAPTER.dump_json(self, indent=1) + b"\n")


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint from which a run continues."""

    path: Path
    """Its directory."""
    saved: SavedRun

    @property
    def steps(self) -> int:
        """Completed steps."""
        return self.saved.snapshot.steps


def read_saved_run(directory: Path) -> SavedRun:
    """Read what `SavedRun.write` wrote.

    Raises:
        RunError: when the file is missing or damaged.
    """
    path = directory / STATE_FILE
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"{path} cannot be read: {reason}; resume from another checkpoint") from None


_ADAPTER = TypeAdapter(SavedRun)


def _without(stream: StreamSnapshot, lost: frozenset[tuple[str, int]]) -> StreamSnapshot:
    groups = tuple(
        group
        for group in stream.groups
        if not any((stream.stream, member.sample) in lost for member in group.members)
    )
    return replace(stream, groups=groups)
