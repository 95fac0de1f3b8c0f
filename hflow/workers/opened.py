"""What a source's body returned, as samples in the store and an event for the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hflow.data.returned import check_value, split_result
from hflow.errors import RecipeError
from hflow.plan.ir import Graph
from hflow.types import Trajectory, Unit
from hflow.workers.base import NodeProgram, SampleReady
from hflow.workers.compute import put_metrics
from hflow.workers.store import Store

Row = Mapping[str, tuple[Unit, Any]]
"""Dataset column -> its unit and value."""


@dataclass(frozen=True)
class Opener:
    """Puts a source's results away.

    Attributes:
        program: the source's.
        streams: the streams that it opens, in the order of its trajectories.
        store: where samples go.
    """

    program: NodeProgram
    streams: tuple[str, ...]
    store: Store

    @classmethod
    def of(cls, program: NodeProgram, graph: Graph, store: Store) -> Opener:
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

    def put(self, sample: int, group: int, result: Any, row: Row, parent: str | None = None) -> SampleReady:
        """Put one sample with its dataset row into the store; returns the event that reports it."""
        trajectories, fields, metrics = self.split(result)
        for stream, trajectory in zip(self.streams, trajectories, strict=True):
            self._check(trajectory)
            self.store.put_trajectory(stream, sample, group, trajectory, row, parent)
        num_tokens = len(trajectories[0].input_ids)
        for (name, unit), value in zip(self.program.returns, fields, strict=True):
            check_value(self.program.name, name, Unit(unit), value, num_tokens)
            self.store.add_value(self.streams[0], name, Unit(unit), (sample,), value)
        put_metrics(self.store, self.streams[0], self.program.name, (sample,), metrics)
        return ready(self.streams[0], sample, trajectories[0])

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


def ready(stream: str, sample: int, trajectory: Trajectory) -> SampleReady:
    """The event that reports a sample. A generated token has a version of 0 or more."""
    drawn = (version for version in trajectory.versions if version >= 0)
    segments = tuple((version, sum(1 for _ in run)) for version, run in groupby(drawn))
    versions = [version for version, _ in segments]
    return SampleReady(
        stream=stream,
        sample=sample,
        length=len(trajectory.input_ids),
        num_learned=trajectory.num_tokens,
        oldest=min(versions, default=-1),
        newest=max(versions, default=-1),
        segments=segments,
        num_turns=trajectory.num_turns,
    )
