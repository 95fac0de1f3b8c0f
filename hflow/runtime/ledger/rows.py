"""`RowBuilder` makes rows of the ledger's tables from what the controller records.

Invariant: each record has one `seq`, which ascends; all rows that are made from a record share it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hflow.runtime.events import Accept, FormBatch, OpenGroup, Refuse, StepDone
from hflow.runtime.ledger.header import Header
from hflow.workers.interface import ComputeReady, NodeResult, SampleReady

NONFINITE = "nonfinite"
"""Reason of a trained sample that was in an update which `optim.on_nonfinite=skip` left out."""


@dataclass(frozen=True)
class GroupIssued:
    """A group was sent to a worker."""

    instruction: OpenGroup
    row: int
    worker: int
    version: int
    reason: str = ""
    """Why a sampler chose the row; empty without a sampler."""


@dataclass(frozen=True)
class SamplesRestarted:
    """Samples that were in flight on a worker that failed begin again."""

    stream: str
    samples: tuple[int, ...]
    reason: str
    """How the worker failed."""


@dataclass(frozen=True)
class RunRewound:
    """The run continues from `step` completed steps."""

    step: int
    position: int
    """Greatest `seq` that remains in its history."""


@dataclass(frozen=True)
class RunClosed:
    """The run is over."""

    reason: str


@dataclass(frozen=True)
class WeightsVerified:
    """A generation replica loaded weights and confirmed their checksum."""

    replica: str
    version: int
    checksum: str


Record = (
    GroupIssued
    | SamplesRestarted
    | WeightsVerified
    | SampleReady
    | ComputeReady
    | NodeResult
    | Accept
    | Refuse
    | FormBatch
    | StepDone
    | RunRewound
    | RunClosed
)


class RowBuilder:
    """Makes rows and keeps them until they are taken: for each table one flat list of values.

    Of the run it remembers only which samples are in the batch of which unfinished step, and which of them
    were in an update that was skipped.

    Args:
        seq: the last `seq` in the file.
    """

    def __init__(self, header: Header, seq: int = 0) -> None:
        self.seq = seq
        self._streams = {stream.name: number for number, stream in enumerate(header.streams)}
        self._sources = {stream.name: stream.source for stream in header.streams}
        self._trained = {stream.name for stream in header.streams if stream.is_trained}
        self._nodes = {node.name: number for number, node in enumerate(header.nodes)}
        self._next_step = 0
        """The step that the next batch of the trained stream is for."""
        self._batches: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Unfinished step -> stream, samples."""
        self._skipped: dict[int, dict[int, str]] = defaultdict(dict)
        """Unfinished step -> sample -> the node that skipped an update with it."""
        self._tables: dict[str, list[Any]] = defaultdict(list)
        self._handlers: dict[type, Callable[[Any, int, int], None]] = {
            GroupIssued: self._add_issued,
            SamplesRestarted: self._add_restarted,
            WeightsVerified: self._add_weights,
            SampleReady: self._add_finished,
            ComputeReady: self._add_computed,
            NodeResult: self._add_batch_result,
            Accept: self._add_accepted,
            Refuse: self._add_refused,
            FormBatch: self._add_batch,
            StepDone: self._add_step,
            RunRewound: self._add_rewind,
            RunClosed: self._add_closing,
        }

    def add(self, time: int, record: Record) -> None:
        """Make the rows of a record of a time, in milliseconds since the run's start."""
        self.seq += 1
        self._handlers[type(record)](record, self.seq, time)

    def take(self) -> dict[str, list[Any]]:
        """Return all rows since the last call, by table."""
        tables, self._tables = self._tables, defaultdict(list)
        return tables

    def _add_issued(self, record: GroupIssued, seq: int, time: int) -> None:
        opened = record.instruction
        stream = self._streams[opened.stream]
        values = (seq, time, opened.group, record.row, record.worker, record.version)
        rows = self._tables["issued"]
        for sample in opened.samples:
            rows += (stream, sample, *values)
        if record.reason:
            self._tables["drawn"] += (stream, opened.group, seq, time, record.reason)

    def _add_restarted(self, record: SamplesRestarted, seq: int, time: int) -> None:
        rows = self._tables["restarted"]
        for sample in record.samples:
            rows += (self._streams[record.stream], sample, seq, time, record.reason)

    def _add_weights(self, record: WeightsVerified, seq: int, time: int) -> None:
        self._tables["commits"] += (seq, time, record.replica, record.version, record.checksum)

    def _add_finished(self, record: SampleReady, seq: int, time: int) -> None:
        stream, sample = self._streams[record.stream], record.sample
        versions = (record.oldest, record.newest) if record.oldest >= 0 else (None, None)
        row = (stream, sample, seq, time, record.length, record.num_learned, record.num_turns, *versions)
        self._tables["finished"] += row
        if record.interruption:
            self._tables["restarted"] += (stream, sample, seq, time, record.interruption)
        if record.value is not None:
            source = self._nodes[self._sources[record.stream]]
            self._tables["computed"] += (source, sample, seq, time, record.value)
        rows = self._tables["segments"]
        for number, (version, tokens) in enumerate(record.segments):
            rows += (stream, sample, seq, number, version, tokens)
        rows = self._tables["trajectories"]
        for number, member in enumerate(record.trajectories):
            versions = (member.oldest, member.newest) if member.oldest >= 0 else (None, None)
            rows += (stream, sample, seq, number, member.length, member.num_learned, member.num_turns)
            rows += versions

    def _add_computed(self, record: ComputeReady, seq: int, time: int) -> None:
        self._tables["computed"] += (self._nodes[record.node], record.key, seq, time, record.value)

    def _add_batch_result(self, record: NodeResult, seq: int, time: int) -> None:
        if record.skipped:
            self._skipped[record.step] |= dict.fromkeys(record.skipped, record.node)
        if record.values:
            node, rows = self._nodes[record.node], self._tables["computed"]
            for sample, number in zip(record.samples, record.values, strict=True):
                rows += (node, sample, seq, time, number)

    def _add_accepted(self, record: Accept, seq: int, time: int) -> None:
        stream, rows = self._streams[record.stream], self._tables["accepted"]
        for sample in record.samples:
            rows += (stream, sample, seq, time)

    def _add_refused(self, record: Refuse, seq: int, time: int) -> None:
        kind = "dropped" if record.reason.is_drop else "refused"
        why = (record.reason.value, self._nodes[record.node], record.message or None)
        stream = self._streams[record.stream]
        self._add_ends(stream, record.samples, (seq, time, kind, self._next_step, *why))

    def _add_batch(self, record: FormBatch, seq: int, time: int) -> None:
        stream = self._streams[record.stream]
        self._tables["batches"] += (seq, time, stream, record.step)
        if record.stream in self._trained:
            self._batches[record.step] = (stream, record.samples)
            self._next_step = record.step + 1
        else:
            self._add_ends(stream, record.samples, (seq, time, "evaluated", record.step, None, None, None))

    def _add_step(self, record: StepDone, seq: int, time: int) -> None:
        self._tables["steps"] += (seq, time, record.step)
        if record.step in self._batches:  # the final cycle has no batch: it only evaluates
            stream, samples = self._batches.pop(record.step)
            skipped, end = self._skipped.pop(record.step, {}), (seq, time, "trained", record.step)
            used = tuple(sample for sample in samples if sample not in skipped)
            self._add_ends(stream, used, (*end, None, None, None))
            for sample, node in skipped.items():
                message = f"{node} skipped an update with it, as the gradient was not finite"
                self._add_ends(stream, (sample,), (*end, NONFINITE, None, message))

    def _add_rewind(self, record: RunRewound, seq: int, time: int) -> None:
        self._batches.clear()
        self._skipped.clear()
        self._next_step = record.step
        self._tables["rewinds"] += (seq, time, record.step, record.position)

    def _add_closing(self, record: RunClosed, seq: int, time: int) -> None:
        """End the samples of steps that were not completed, which is known only now."""
        for step, (stream, samples) in self._batches.items():
            message = f"it was in the batch of step {step + 1}, which was not completed"
            self._add_ends(stream, samples, (seq, time, "unused", step, record.reason, None, message))
        self._batches.clear()
        self._tables["closings"] += (seq, time, record.reason)

    def _add_ends(self, stream: int, samples: tuple[int, ...], values: tuple[Any, ...]) -> None:
        rows = self._tables["ends"]
        for sample in samples:
            rows += (stream, sample, *values)
