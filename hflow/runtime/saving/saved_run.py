"""`SavedRun`: what the controller stores in a checkpoint; workers store models and samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hflow.base.errors import RunError
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.schedule import scheduled_updates
from hflow.runtime.saving.checkpoint import other_version_fix
from hflow.runtime.state.snapshot import EvaluationSnapshot, RunSnapshot, StreamSnapshot
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
    updates: Mapping[str, int] = field(default_factory=dict)
    """Trained model -> optimizer steps that were scheduled before the checkpoint, by the plans that ran."""

    outputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Node on samples or groups -> the fields that it made, as `stream/field`."""

    samplers: Mapping[str, str] = field(default_factory=dict)
    """Stream -> JSON of what its sampler of rows knows."""

    def with_outputs(self, outputs: Mapping[str, tuple[str, ...]]) -> SavedRun:
        """Return the same where nodes that make other fields now are not done, so that they run again."""
        other = {name for name, fields in self.outputs.items() if outputs.get(name, fields) != fields}
        streams = tuple(_with_undone(stream, other) for stream in self.snapshot.streams)
        return replace(self, snapshot=replace(self.snapshot, streams=streams))

    def extra_updates(self, plan: Plan) -> dict[str, int]:
        """Return trained model -> optimizer steps before the checkpoint beyond those of this plan.

        They are not 0 where other minibatches, epochs, `after` or `every` ran. Learning rates fall over all
        steps, before and after, so that they reach their end at the end of the run.
        """
        scheduled = scheduled_updates(plan, self.snapshot.steps)
        return {model: self.updates.get(model, num) - num for model, num in scheduled.items()}

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

    def with_rows(self, num_rows: Mapping[str, int]) -> SavedRun:
        """Return the same for evaluations, root stream -> rows of its dataset, that may have other sizes.

        Of one that has, the last evaluation begins again if it was not complete.
        """
        saved, evaluations = self, []
        for name, evaluation in self.snapshot.evaluations:
            (stream,) = (stream for stream in self.snapshot.streams if stream.stream == name)
            if _has_other_rows(evaluation, stream, num_rows[name]):
                saved = saved.without((name, member.sample) for g in stream.groups for member in g.members)
                last = evaluation.last if evaluation.active is None else evaluation.active - 1
                first = stream.next_group
                evaluation = replace(evaluation, first_group=first, active=None, last=last, num_groups=None)
            evaluations.append((name, evaluation))
        return replace(saved, snapshot=replace(saved.snapshot, evaluations=tuple(evaluations)))

    def write(self, directory: Path) -> None:
        """Write it into the directory of a checkpoint."""
        (directory / STATE_FILE).write_bytes(_ADAPTER.dump_json(self, indent=1) + b"\n")


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint from which a run continues."""

    path: Path
    """The checkpoint's directory."""
    saved: SavedRun

    @property
    def steps(self) -> int:
        """Completed steps."""
        return self.saved.snapshot.steps


def read_saved_run(directory: Path) -> SavedRun:
    """Read what `SavedRun.write` wrote.

    Raises:
        RunError: when the file is missing or damaged, or another version of hflow wrote it.
    """
    path = directory / STATE_FILE
    try:
        text = path.read_bytes()
        saved = _ADAPTER.validate_json(text)
        unknown = _unknown_key(json.loads(text), _ADAPTER.dump_python(saved, mode="json"))
        problem = f"{unknown}: unknown key" if unknown else ""
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}; resume from another checkpoint") from None
    except ValidationError as error:
        first = error.errors()[0]
        problem = ": ".join([".".join(map(str, first["loc"])), first["msg"]])
    if problem:
        raise RunError(
            f"{path} does not fit this version of hflow: {problem}; {other_version_fix(directory)}"
        )
    return saved


def _unknown_key(given: Any, known: Any) -> str | None:
    """Return the first key of JSON values that is not among those that were read from them."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            if key not in known:
                return str(key)
            if unknown := _unknown_key(value, known[key]):
                return unknown
    if isinstance(given, list) and isinstance(known, list):
        pairs = zip(given, known, strict=True)
        return next((unknown for pair in pairs if (unknown := _unknown_key(*pair))), None)
    return None


_ADAPTER = TypeAdapter(SavedRun)


def _has_other_rows(evaluation: EvaluationSnapshot, stream: StreamSnapshot, num_rows: int) -> bool:
    """Return whether the dataset of an evaluation had another number of rows when it was saved."""
    if evaluation.num_groups is not None:
        return evaluation.num_groups != num_rows
    return any(group.number - evaluation.first_group >= num_rows for group in stream.groups)


def _with_undone(stream: StreamSnapshot, nodes: Set[str]) -> StreamSnapshot:
    def left(done: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in done if name not in nodes)

    groups = tuple(
        replace(
            group,
            members=tuple(replace(member, done=left(member.done)) for member in group.members),
            done=left(group.done),
        )
        for group in stream.groups
    )
    return replace(stream, groups=groups)


def _without(stream: StreamSnapshot, lost: frozenset[tuple[str, int]]) -> StreamSnapshot:
    groups = tuple(
        group
        for group in stream.groups
        if not any((stream.stream, member.sample) in lost for member in group.members)
    )
    return replace(stream, groups=groups)
