"""Which groups are opened now: evaluations first, then the trained stream up to its capacity."""

from __future__ import annotations

from collections.abc import Sequence

from hflow.runtime.state.device_state import Engine, EngineState
from hflow.runtime.state.evaluation import Evaluation
from hflow.runtime.state.staleness import capacity
from hflow.runtime.state.state_parts import StateParts
from hflow.runtime.state.weight_updates import can_begin


class Admission:
    """Opens groups.

    `max_concurrent` bounds the samples in flight over all streams; it is raised where it could
    not hold one group of each stream that must make progress.

    Samples of the trained stream sleep, still in flight, while batch nodes have their shared
    devices. A side stream that does not take its turns on the same devices may be what those
    nodes wait for, so the trained stream always leaves it room for one group.
    """

    def __init__(self, data: StateParts) -> None:
        self._data = data
        rollout = data.rollout
        turns = set(data.shared_by[rollout.stream.name])
        self._reserved = [
            e for e in data.evaluations.values() if turns and turns != set(data.shared_by[e.stream.name])
        ]
        together = sum(stream.graph.size for stream in (rollout, *self._reserved))
        largest = max(stream.graph.size for stream in data.streams)
        self.max_samples = max(data.schedule.settings.max_concurrent, together, largest)

    def begin_evaluations(self) -> None:
        """Begin the evaluations whose engines are awake with the weights of a due version."""
        for evaluation in self._data.evaluations.values():
            if evaluation.active is not None:
                continue
            version = evaluation.candidate()
            if version is not None and self._has_engines(evaluation, version):
                evaluation.begin(version)

    def open_groups(self) -> None:
        """Open as many groups as there is room for."""
        for evaluation in self._data.evaluations.values():
            if evaluation.active is None:
                continue
            for _ in range(self._num_free() // evaluation.graph.size):
                if evaluation.exhausted:
                    break
                evaluation.open_group()
        rollout = self._data.rollout
        if num_groups := self._rollout_capacity():
            version = self._data.engine_version(rollout.stream.name)
            for _ in range(num_groups):
                rollout.open_group_at(version)

    def _has_engines(self, evaluation: Evaluation, version: int) -> bool:
        engines = self._data.engines_of[evaluation.stream.name]
        return can_begin(evaluation, version, self._data) and all(
            engine.state is EngineState.AWAKE and (engine.version == version or not evaluation.models)
            for engine in engines
        )

    def _num_free(self) -> int:
        return max(0, self.max_samples - sum(stream.num_generating for stream in self._data.streams))

    def _rollout_capacity(self) -> int:
        """Asked after every event; there is no room after most, which is found out first."""
        data, rollout = self._data, self._data.rollout
        free, size = self._num_free(), rollout.graph.size
        if free < size or rollout.exhausted or rollout.is_full:
            return 0
        engines = data.engines_of[rollout.stream.name]
        if any(engine.state is not EngineState.AWAKE for engine in engines):
            return 0
        limit = rollout.limit(*self._progress_of(engines))
        if limit <= rollout.num_admitted:
            return 0
        for evaluation in self._reserved:
            free -= max(0, evaluation.graph.size - evaluation.num_generating)
        return capacity(free, size, limit, rollout.num_admitted)

    def _progress_of(self, engines: Sequence[Engine]) -> tuple[int, int]:
        """The version that the trained stream is generated with, or the steps that are trained.

        A stream reads trained weights or it does not: the other number is 0.
        """
        data = self._data
        if data.rollout.models:
            return min(engine.version for engine in engines), 0
        return 0, data.progress.steps_settled(data.trained_nodes)
