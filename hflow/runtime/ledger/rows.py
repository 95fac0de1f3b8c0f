"""From what the controller noted to rows of the ledger's tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hflow.runtime.events import Accept, FormBatch, OpenGroup, Refuse, StepDone
from hflow.runtime.ledger.header import Header
from hflow.workers.interface import ComputeReady, NodeResult, SampleReady


@dataclass(frozen=True)
class Issued:
    """A group was sent to a worker."""

    what: OpenGroup
    row: int
    worker: int
    version: int


@dataclass(frozen=True)
class Rewind:
    """The run goes on from `step` completed steps."""

    step: int
    position: int
    """Greatest `seq` that stays in its history."""


@dataclass(frozen=True)
class Closing:
    """The run is over."""

    reason: str


@dataclass(frozen=True)
class Commit:
    """A generation replica holds weights, and confirmed that they are what was sent."""

    replica: str
    version: int
    digest: str


Note = (
    Issued
    | Commit
    | SampleReady
    | ComputeReady
    | NodeResult
    | Accept
    | Refuse
    | FormBatch
    | StepDone
    | Rewind
    | Closing
)


class Rows:
    """Rows that are not written yet, by table: each table's as one flat list of values.

    It remembers of the run which samples are bound to which unfinished step, and no more.

    Args:
        header: of the run.
        seq: of the last row that is in the file.
    """

    def __init__(self, header: Header, seq: int = 0) -> None:
        self.seq = seq
        self._streams = {stream.name: number for number, stream in enumerate(header.streams)}
        self._sources = {stream.name: stream.source for stream in header.streams}
        self._trained = {stream.name for stream in header.streams if stream.is_trained}
        self._nodes = {node.name: number for number, node in enumerate(header.nodes)}
        self._filling = 0
        """The step that the next batch of the trained stream is for."""
        self._bound: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Step -> stream, samples."""
        self._tables: dict[str, list[Any]] = defaultdict(list)
        self._takers: dict[type, Callable[[Any, int, int], None]] = {
            Issued: self._issued,
            Commit: self._committed,
            SampleReady: self._finished,
            ComputeReady: self._computed,
            NodeResult: self._judged,
            Accept: self._accepted,
            Refuse: self._refused,
            FormBatch: self._formed,
            StepDone: self._step_done,
            Rewind: self._rewound,
            Closing: self._closed,
        }

    def add(self, time: int, note: Note) -> None:
        """Take a note of a moment, in milliseconds."""
        self.seq += 1
        self._takers[type(note)](note, self.seq, time)

    def take(self) -> dict[str, list[Any]]:
        """All rows since the last call."""
        tables, self._tables = self._tables, defaultdict(list)
        return tables

    def _issued(self, note: Issued, seq: int, time: int) -> None:
        what = note.what
        stream, rest = (
            self._streams[what.stream],
            (seq, time, what.group, note.row, note.worker, note.version),
        )
        rows = self._tables["issued"]
        for sample in what.samples:
            rows += (stream, sample, *rest)

    def _committed(self, note: Commit, seq: int, time: int) -> None:
        self._tables["commits"] += (seq, time, note.replica, note.version, note.digest)

    def _finished(self, note: SampleReady, seq: int, time: int) -> None:
        stream, sample = self._streams[note.stream], note.sample
        ages = (note.oldest, note.newest) if note.oldest >= 0 else (None, None)
        row = (stream, sample, seq, time, note.length, note.num_learned, note.num_turns, *ages)
        self._tables["finished"] += row
        if note.value is not None:
            source = self._nodes[self._sources[note.stream]]
            self._tables["computed"] += (source, sample, seq, time, note.value)
        rows = self._tables["segments"]
        for number, (version, tokens) in enumerate(note.segments):
            rows += (stream, sample, seq, number, version, tokens)

    def _computed(self, note: ComputeReady, seq: int, time: int) -> None:
        self._tables["computed"] += (self._nodes[note.node], note.key, seq, time, note.value)

    def _judged(self, note: NodeResult, seq: int, time: int) -> None:
        node, rows = self._nodes[note.node], self._tables["computed"]
        for sample, number in zip(note.samples, note.numbers, strict=True):
            rows += (node, sample, seq, time, number)

    def _accepted(self, note: Accept, seq: int, time: int) -> None:
        stream, rows = self._streams[note.stream], self._tables["accepted"]
        for sample in note.samples:
            rows += (stream, sample, seq, time)

    def _refused(self, note: Refuse, seq: int, time: int) -> None:
        kind = "dropped" if note.reason.is_drop else "refused"
        rest = (note.reason.value, self._nodes[note.node], note.message or None)
        self._end(self._streams[note.stream], note.samples, (seq, time, kind, self._filling, *rest))

    def _formed(self, note: FormBatch, seq: int, time: int) -> None:
        stream = self._streams[note.stream]
        self._tables["batches"] += (seq, time, stream, note.step)
        if note.stream in self._trained:
            self._bound[note.step] = (stream, note.samples)
            self._filling = note.step + 1
        else:
            self._end(stream, note.samples, (seq, time, "evaluated", note.step, None, None, None))

    def _step_done(self, note: StepDone, seq: int, time: int) -> None:
        self._tables["steps"] += (seq, time, note.step)
        if note.step in self._bound:  # the final cycle has none: it only evaluates
            stream, samples = self._bound.pop(note.step)
            self._end(stream, samples, (seq, time, "trained", note.step, None, None, None))

    def _rewound(self, note: Rewind, seq: int, time: int) -> None:
        self._bound.clear()
        self._filling = note.step
        self._tables["rewinds"] += (seq, time, note.step, note.position)

    def _closed(self, note: Closing, seq: int, time: int) -> None:
        """Only here it is known what was bound to a step that was not completed."""
        for step, (stream, samples) in self._bound.items():
            message = f"step {step}, which was to train it, was not completed"
            self._end(stream, samples, (seq, time, "unused", step, note.reason, None, message))
        self._bound.clear()
        self._tables["closings"] += (seq, time, note.reason)

    def _end(self, stream: int, samples: tuple[int, ...], rest: tuple[Any, ...]) -> None:
        rows = self._tables["ends"]
        for sample in samples:
            rows += (stream, sample, *rest)
