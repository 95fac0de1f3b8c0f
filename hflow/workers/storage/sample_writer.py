"""What a source's body returned, as samples in the store and an event for the controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hflow.data.unpack_returns import check_value, split_result
from hflow.errors import RecipeError
from hflow.planner.ir import Graph
from hflow.types import Trajectory, Unit
from hflow.workers.interface import NodeProgram, SampleReady
from hflow.workers.storage.dataset_rows import DatasetRow
from hflow.workers.storage.sample_store import SampleStore


@dataclass(frozen=True)
class SampleWriter:
    """Puts a source's results away.

    Attributes:
        program: the source's.
        streams: the streams that it opens, in the order of its trajectories.
        store: where samples go.
    """

    program: NodeProgram
    streams: tuple[str, ...]
    store: SampleStore

    @classmethod
    def of(cls, program: NodeProgram, graph: Graph, store: SampleStore) -> SampleWriter:
        """The opener of a node's streams."""
        return cls(program, tuple(s.name for s in graph.streams if s.source == program.name), store)

    def split(self, result: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
        """Trajectories (for each stream one, or a list: a group), fields, metrics.

        Raises:
            RecipeError: when the body returned something else than it declares.
        """
        program = self.program
        declared = (*((stream, "trajectory") for stream in self.streams), *program.returns)
        results, metrics = split_result(program.name, declared, program.metrics, result)
        return results[: len(self.streams)], results[len(self.streams) :], metrics

    def put(
        self, sample: int, group: int, result: Any, row: DatasetRow, parent: str | None = None
    ) -> SampleReady:
        """Put one sample with its dataset row into the store; returns the event that reports it."""
        trajectories, fields, metrics = self.split(result)
        for stream, trajectory in zip(self.streams, trajectories, strict=True):
            self._check(trajectory)
            self.store.put_trajectory(stream, sample, group, trajectory, row, parent)
            self._put_fields(stream, sample, len(trajectory.input_ids), fields)
        self.report(sample, metrics)
        return sample_ready_event(self.streams[0], sample, trajectories, _number(self.program, fields))

    def report(self, sample: int, metrics: Mapping[str, Any]) -> None:
        """Keep numbers beside a sample, which are averaged over the batch."""
        self.store.add_metrics(self.streams[0], self.program.name, (sample,), metrics)

    def _put_fields(self, stream: str, sample: int, num_tokens: int, fields: Sequence[Any]) -> None:
        """Every stream that a source opens has its fields."""
        for (name, unit), value in zip(self.program.returns, fields, strict=True):
            check_value(self.program.name, name, Unit(unit), value, num_tokens)
            self.store.add_value(stream, name, Unit(unit), (sample,), value)

    def members(self, result: Any, num_samples: int) -> list[Any]:
        """The result of each member, of a body that is called once for a group.

        Raises:
            RecipeError: when it did not return as many trajectories as the group has members.
        """
        found = list(result) if isinstance(result, list) else [result]
        if len(found) != num_samples:
            raise RecipeError(
                f"node {self.program.name!r} returned {len(found)} trajectories for a group of "
                f"{num_samples}; return a list with one for each member, or set group= to their number"
            )
        return found

    def _check(self, trajectory: Any) -> None:
        if not isinstance(trajectory, Trajectory) or not trajectory.input_ids:
            got = "an empty one" if isinstance(trajectory, Trajectory) else type(trajectory).__name__
            raise RecipeError(f"node {self.program.name!r} must return a trajectory with tokens, not {got}")


def sample_ready_event(
    stream: str, sample: int, trajectories: Sequence[Trajectory], value: float | None = None
) -> SampleReady:
    """The event that reports a sample, with all its trajectories, and the number that its source gave it.

    A generated token has a version of 0 or more.
    """
    segments = _segments(trajectories)
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


def _segments(trajectories: Sequence[Trajectory]) -> tuple[tuple[int, int], ...]:
    """Runs of generated tokens of one version, or sums by version where there are several trajectories."""
    runs = [run for trajectory in trajectories for run in _runs(trajectory)]
    if len(trajectories) == 1:
        return tuple(runs)
    sums: Counter[int] = Counter()
    for version, tokens in runs:
        sums[version] += tokens
    return tuple(sorted(sums.items()))


def _runs(trajectory: Trajectory) -> Iterator[tuple[int, int]]:
    drawn = (version for version in trajectory.versions if version >= 0)
    yield from ((version, sum(1 for _ in run)) for version, run in groupby(drawn))


def _number(program: NodeProgram, fields: Sequence[Any]) -> float | None:
    """The number that the controller is told of a sample, of those that its source returned."""
    named = zip(program.returns, fields, strict=True)
    return next((float(value) for (name, _), value in named if name == program.reported), None)
