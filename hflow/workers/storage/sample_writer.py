"""`SampleWriter`: puts what a source's body returned into the store, and makes the event that reports it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from hflow.data.batch import Batch, Column
from hflow.data.routed_experts import pack_rows
from hflow.data.unpack_returns import check_value, split_result
from hflow.errors import RecipeError
from hflow.planner.ir import Plan
from hflow.planner.model_shape import routing_format
from hflow.types import Trajectory, Unit
from hflow.types.routed_experts import ROUTED_EXPERTS, RoutingFormat
from hflow.workers.interface import NodeProgram, SampleReady
from hflow.workers.storage.dataset_rows import DatasetRow
from hflow.workers.storage.sample_store import SampleStore


@dataclass(frozen=True)
class SampleWriter:
    """Writes the samples of one source, a generate or encode node, into the store.

    Attributes:
        program: the source's program.
        streams: the streams that the source opens, in the order in which its body returns trajectories.
        store: where samples are stored.
        routing: how the experts of tokens are stored; None where they are not.
    """

    program: NodeProgram
    streams: tuple[str, ...]
    store: SampleStore
    routing: RoutingFormat | None = None

    @classmethod
    def for_node(cls, program: NodeProgram, plan: Plan, store: SampleStore) -> SampleWriter:
        """Make the writer for a node and the streams that it opens."""
        streams = tuple(s.name for s in plan.graph.streams if s.source == program.name)
        routing = None
        if program.options.get("routing_replay"):
            routing = routing_format(dict(plan.shapes)[program.models[0]])
        return cls(program, streams, store, routing)

    def write(
        self, sample: int, group: int, result: Any, row: DatasetRow, parent: str | None = None
    ) -> SampleReady:
        """Store one sample: the body's result and the dataset row. Returns the event that reports it.

        Every stream that the source opens gets all returned fields.

        Raises:
            RecipeError: when the body returned something else than it declares.
        """
        trajectories, fields, metrics = self._split(result)
        for stream, trajectory in zip(self.streams, trajectories, strict=True):
            self._check(trajectory)
            self.store.put_trajectory(stream, sample, group, trajectory, row, parent)
            self._write_fields(stream, sample, len(trajectory.input_ids), fields)
            if self.routing is not None:
                self._write_experts(stream, sample, group, trajectory, self.routing)
        self.write_metrics(sample, metrics)
        value = _reported_value(self.program, fields)
        return sample_ready_event(self.streams[0], sample, trajectories, value)

    def write_metrics(self, sample: int, metrics: Mapping[str, Any]) -> None:
        """Store metrics of a sample; they are averaged over the batch."""
        self.store.add_metrics(self.streams[0], self.program.name, (sample,), metrics)

    def split_group(self, result: Any, num_samples: int) -> list[Any]:
        """Return the result of each member, of a body that is called once for a group.

        Raises:
            RecipeError: when it did not return as many trajectories as the group has members.
        """
        members = list(result) if isinstance(result, list) else [result]
        if len(members) != num_samples:
            raise RecipeError(
                f"node {self.program.name!r} returned {len(members)} trajectories for a group of "
                f"{num_samples}. Return a list with one trajectory per member, or change the node's group=."
            )
        return members

    def _split(self, result: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
        """Split a body's result into trajectories (one per stream), fields and metrics."""
        program = self.program
        declared = (*((stream, "trajectory") for stream in self.streams), *program.returns)
        results, metrics = split_result(program.name, declared, program.metrics, result)
        return results[: len(self.streams)], results[len(self.streams) :], metrics

    def _write_fields(self, stream: str, sample: int, num_tokens: int, fields: Sequence[Any]) -> None:
        for (name, unit), value in zip(self.program.returns, fields, strict=True):
            check_value(self.program.name, name, Unit(unit), value, num_tokens)
            self.store.add_value(stream, name, Unit(unit), (sample,), value)

    def _write_experts(
        self, stream: str, sample: int, group: int, trajectory: Trajectory, form: RoutingFormat
    ) -> None:
        """Store the experts that computed the tokens of a trajectory."""
        num_tokens = len(trajectory.input_ids)
        rows = pack_rows(trajectory.routed_experts, num_tokens, form)
        samples, groups, lengths = np.array([[sample], [group], [num_tokens]], np.int64)
        self.store.add(stream, Batch(samples, groups, lengths, {ROUTED_EXPERTS: Column(Unit.TOKEN, rows)}))

    def _check(self, trajectory: Any) -> None:
        if not isinstance(trajectory, Trajectory) or not trajectory.input_ids:
            got = "an empty one" if isinstance(trajectory, Trajectory) else type(trajectory).__name__
            raise RecipeError(f"node {self.program.name!r} must return a trajectory with tokens, not {got}")


def sample_ready_event(
    stream: str, sample: int, trajectories: Sequence[Trajectory], value: float | None = None
) -> SampleReady:
    """Return the event that reports a sample with all its trajectories.

    Args:
        stream: the first stream that the source opens, which names the sample.
        sample: its id.
        trajectories: one per stream. The version of a token is -1 where it was not generated.
        value: the number that the source reports of the sample.
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
