"""`SampleWriter`: puts what a source's body returned into the store, and makes the event that reports it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from hflow.base.errors import ReturnError
from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.returned_values import (
    DeclaredReturns,
    checked_metrics,
    checked_trajectory,
    split_result,
)
from hflow.graph.ir import EPISODE_FIELDS
from hflow.planner.plan.rows import Plan
from hflow.types import Trajectory, Unit
from hflow.types.recorded import RecordedKind, RowFormat, requested_kinds
from hflow.types.trajectory import PIXELS
from hflow.workers.interface import NodeProgram, SampleReady, TrajectoryCounts
from hflow.workers.storage.dataset_rows import DatasetRow
from hflow.workers.storage.sample_store import SampleStore
from hflow.workers.storage.trajectory_list import described, index_of_tokens, join, without_repeated_draws


@dataclass(frozen=True)
class SampleResult:
    """What the body of a source returned for one sample, as plain values."""

    trajectories: tuple[Trajectory, ...]
    """One per stream that the source opens. Of an episode that returns a list, all tokens of the list."""
    fields: tuple[tuple[Any, ...], ...]
    """The returned fields, for each stream."""
    metrics: Mapping[str, float]
    recorded: tuple[dict[str, Column], ...]
    """What is stored of the record of each trajectory, by kind."""
    members: tuple[Trajectory, ...] = ()
    """The list, if the episode returns one."""


@dataclass(frozen=True)
class SampleWriter:
    """Writes the samples of one source, a generate or encode node, into the store.

    Attributes:
        program: the source's program.
        streams: the streams that the source opens, in the order in which its body returns trajectories.
        store: where samples are stored.
        recorded: the kinds of which the streams have a field, and the formats of their entries.
        returns_list: whether an episode returns a list of trajectories.
        sees: whether the model sees images.
    """

    program: NodeProgram
    streams: tuple[str, ...]
    store: SampleStore
    recorded: tuple[tuple[RecordedKind, RowFormat], ...] = ()
    returns_list: bool = False
    sees: bool = False

    @classmethod
    def for_node(cls, program: NodeProgram, plan: Plan, store: SampleStore) -> SampleWriter:
        """Make the writer for a node and the streams that it opens."""
        streams = tuple(s.name for s in plan.graph.streams if s.source == program.name)
        kinds, shapes = requested_kinds(program.options), dict(plan.shapes)
        formats = [(kind, kind.row_format(shapes[program.models[0]], program.options)) for kind in kinds]
        recorded = tuple((kind, form) for kind, form in formats if form is not None)
        returns_list = plan.graph.node(program.name).spec.returns_list
        sees = any(model.vision for model in plan.graph.models if model.name in program.models[:1])
        return cls(program, streams, store, recorded, returns_list, sees)

    def read(self, result: Any) -> SampleResult:
        """Return a body's result for one sample, checked.

        Raises:
            ReturnError: when that is not what it declares.
        """
        program = self.program
        if self.returns_list:
            return self._read_list(result)
        declared = (*((stream, "trajectory") for stream in self.streams), *program.returns)
        results, metrics = split_result(program.name, declared, program.metrics, result)
        num_streams = len(self.streams)
        trajectories = tuple(checked_trajectory(program.name, x) for x in results[:num_streams])
        returns = DeclaredReturns(program.name, program.returns, program.scalars)
        return SampleResult(
            trajectories,
            tuple(returns.read_fields(results[num_streams:], (len(x.input_ids),)) for x in trajectories),
            checked_metrics(program.name, metrics),
            tuple(map(self._pack_recorded, trajectories)),
        )

    def _read_list(self, result: Any) -> SampleResult:
        """Return the checked result of an episode that returns a list of trajectories."""
        program, num_made = self.program, len(EPISODE_FIELDS)
        own = program.returns[:-num_made]
        declared = ((self.streams[0], "trajectory"), *own)
        (returned, *values), metrics = split_result(program.name, declared, program.metrics, result)
        if not isinstance(returned, list | tuple) or not returned:
            got = "an empty one" if isinstance(returned, list | tuple) else type(returned).__name__
            raise ReturnError(f"node {program.name!r} must return a list of trajectories, not {got}")
        members = without_repeated_draws([checked_trajectory(program.name, x) for x in returned])
        sample = join(members)
        made = (index_of_tokens(members), described(members))
        fields = DeclaredReturns(program.name, program.returns, program.scalars).read_fields(
            (*values, *made), (len(sample.input_ids),)
        )
        packed = [self._pack_recorded(x) for x in members]
        recorded = {
            kind.name: Column(kind.unit, np.concatenate([columns[kind.name].values for columns in packed]))
            for kind, _ in self.recorded
        }
        return SampleResult(
            (sample,), (fields,), checked_metrics(program.name, metrics), (recorded,), members
        )

    def write(
        self, sample: int, group: int, result: SampleResult, row: DatasetRow, parent: str | None = None
    ) -> SampleReady:
        """Store one sample: the body's result and the dataset row. Returns the event that reports it.

        Every stream that the source opens gets all returned fields.
        """
        for i, stream in enumerate(self.streams):
            trajectory, recorded = result.trajectories[i], result.recorded[i]
            self.store.put_trajectory(stream, sample, group, trajectory, row, parent)
            if self.sees:
                self.store.add_value(stream, PIXELS, Unit.PIXELS, (sample,), trajectory.pixels)
            for (name, unit), value in zip(self.program.returns, result.fields[i], strict=True):
                self.store.add_value(stream, name, Unit(unit), (sample,), value)
            if recorded:
                ids = [[sample], [group], [len(trajectory.input_ids)]]
                samples, groups, lengths = np.array(ids, np.int64)
                self.store.add(stream, Batch(samples, groups, lengths, recorded))
        self.write_metrics(sample, result.metrics)
        value = _reported_value(self.program, result.fields[0])
        event = sample_ready_event(self.streams[0], sample, result.members or result.trajectories, value)
        return replace(event, trajectories=tuple(map(_counts, result.members)))

    def write_metrics(self, sample: int, metrics: Mapping[str, float]) -> None:
        """Store metrics of a sample; they are averaged over the batch."""
        self.store.add_metrics(self.streams[0], self.program.name, (sample,), metrics)

    def read_group(self, result: Any, num_samples: int) -> list[SampleResult]:
        """Return the checked result of each member, of a body that is called once for a group.

        Raises:
            ReturnError: when it did not return as many trajectories as the group has members, or one of them
                is not what it declares.
        """
        members = list(result) if isinstance(result, list) else [result]
        if len(members) != num_samples:
            raise ReturnError(
                f"node {self.program.name!r} returned {len(members)} trajectories for a group of "
                f"{num_samples}. Return a list with one trajectory per member, or change the node's group=."
            )
        return [self.read(member) for member in members]

    def _pack_recorded(self, trajectory: Trajectory) -> dict[str, Column]:
        """Return the record of a trajectory, as it is stored."""
        num_tokens = len(trajectory.input_ids)
        return {
            kind.name: Column(kind.unit, kind.pack(trajectory.recorded.get(kind.name, ()), num_tokens, form))
            for kind, form in self.recorded
        }


def sample_ready_event(
    stream: str, sample: int, trajectories: Sequence[Trajectory], value: float | None = None
) -> SampleReady:
    """Return the event that reports a sample, named by its source's first stream, with all its trajectories.

    The version of a token is -1 where it was not generated. `value` is the number that the source reports.
    """
    segments = _version_segments(trajectories)
    versions = [version for version, _ in segments]
    return SampleReady(
        stream=stream,
        sample=sample,
        length=sum(len(trajectory.input_ids) for trajectory in trajectories),
        num_learned=sum(trajectory.num_tokens for trajectory in trajectories),
        oldest=min(versions, default=-1),
        newest=max(versions, default=-1),
        segments=segments,
        num_turns=sum(trajectory.num_turns for trajectory in trajectories),
        value=value,
    )


def _counts(trajectory: Trajectory) -> TrajectoryCounts:
    versions = [version for version, _ in _version_runs(trajectory)]
    return TrajectoryCounts(
        len(trajectory.input_ids),
        trajectory.num_tokens,
        trajectory.num_turns,
        min(versions, default=-1),
        max(versions, default=-1),
    )


def _version_segments(trajectories: Sequence[Trajectory]) -> tuple[tuple[int, int], ...]:
    """Return (version, number of generated tokens) pairs.

    They are runs in order for a single trajectory, and sums by version for several.
    """
    runs = [run for trajectory in trajectories for run in _version_runs(trajectory)]
    if len(trajectories) == 1:
        return tuple(runs)
    sums: Counter[int] = Counter()
    for version, num_tokens in runs:
        sums[version] += num_tokens
    return tuple(sorted(sums.items()))


def _version_runs(trajectory: Trajectory) -> Iterator[tuple[int, int]]:
    generated = (version for version in trajectory.versions if version >= 0)
    yield from ((version, sum(1 for _ in run)) for version, run in groupby(generated))


def _reported_value(program: NodeProgram, fields: Sequence[Any]) -> float | None:
    """Return the field that is reported to the controller, of those that the source returned."""
    named = zip(program.returns, fields, strict=True)
    return next((float(value) for (name, _), value in named if name == program.reported), None)
