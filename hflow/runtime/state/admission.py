"""`Admission` decides which groups are opened: those of evaluations first, then those of the trained stream.

Invariant: no more than `max_samples` samples are in flight, over all streams.
"""

from __future__ import annotations

from collections.abc import Sequence

from hflow.runtime.state.checkpoints import pending_checkpoint
from hflow.runtime.state.device_state import EnginePhase, EngineState
from hflow.runtime.state.evaluation import Evaluation
from hflow.runtime.state.rules import capacity
from hflow.runtime.state.state_parts import StateParts
from hflow.runtime.state.weight_updates import can_begin


class Admission:
    """Opens groups.

    `max_samples` is `max_concurrent`, or more where that would not hold one group of each stream that must
    make progress.

    Samples of the trained stream stay in flight, asleep, while batch nodes use their shared devices. A side
    stream whose engines do not take turns on the same devices may be what these nodes wait for. So room for
    one group of each such side stream is always reserved.
    """

    def __init__(self, parts: StateParts) -> None:
        self._parts = parts
        trained = parts.trained
        shared_devices = set(parts.shared_devices[trained.stream.name])
        self._reserved = [
            evaluation
            for evaluation in parts.evaluations.values()
            if shared_devices and shared_devices != set(parts.shared_devices[evaluation.stream.name])
        ]
        needed = sum(stream.dependencies.size for stream in (trained, *self._reserved))
        largest = max(stream.dependencies.size for stream in parts.streams)
        self.max_samples = max(parts.schedule.settings.max_concurrent, needed, largest)
        self._max_admitted = 0
        """Groups of the trained stream that may be admitted in total; 0 while none may be opened."""

    def begin_evaluations(self) -> None:
        """Begin the evaluations that are due and whose engines are awake with the version."""
        pending = pending_checkpoint(self._parts)
        for evaluation in self._parts.evaluations.values():
            if evaluation.active is not None:
                continue
            version = evaluation.candidate()
            if version is None or (pending is not None and version > pending):
                continue
            if self._has_engines(evaluation, version):
                evaluation.begin(version)

    def update_limit(self) -> None:
        """Read again how many groups of the trained stream may be admitted.

        That follows from steps, from the phases of engines and from their versions, so samples and their
        nodes do not change it.
        """
        parts, trained = self._parts, self._parts.trained
        engines = parts.engines_of[trained.stream.name]
        is_awake = all(engine.phase is EnginePhase.AWAKE for engine in engines)
        is_open = is_awake and not parts.progress.is_stopping
        self._max_admitted = trained.group_limit(*self._progress_of(engines)) if is_open else 0

    def open_groups(self) -> None:
        """Open as many groups as may be opened now."""
        for evaluation in self._parts.evaluations.values():
            if evaluation.active is None:
                continue
            for _ in range(self._num_free_samples() // evaluation.dependencies.size):
                if evaluation.exhausted:
                    break
                evaluation.open_group()
        trained = self._parts.trained
        if num_groups := self._trained_capacity():
            version = self._parts.engine_version(trained.stream.name)
            for _ in range(num_groups):
                trained.open_group_at(version)

    def _has_engines(self, evaluation: Evaluation, version: int) -> bool:
        engines = self._parts.engines_of[evaluation.stream.name]
        return can_begin(evaluation, version, self._parts) and all(
            engine.phase is EnginePhase.AWAKE and (engine.version == version or not evaluation.models)
            for engine in engines
        )

    def _num_free_samples(self) -> int:
        return max(0, self.max_samples - sum(stream.num_generating for stream in self._parts.streams))

    def _trained_capacity(self) -> int:
        """Return the number of groups of the trained stream that may be opened now.

        This is called after every event, and usually there is no room, so that is checked first.
        """
        trained = self._parts.trained
        num_admitted, size = trained.num_admitted, trained.dependencies.size
        if num_admitted >= self._max_admitted or trained.exhausted or trained.is_full:
            return 0
        num_free = self._num_free_samples()
        for evaluation in self._reserved:
            num_free -= max(0, evaluation.dependencies.size - evaluation.num_generating)
        return capacity(num_free, size, self._max_admitted, num_admitted)

    def _progress_of(self, engines: Sequence[EngineState]) -> tuple[int, int]:
        """Return the version that generates the trained stream, and the completed steps.

        Only one of them matters, by whether the stream reads trained weights. The other is 0.
        """
        parts = self._parts
        if parts.trained.models:
            return min(engine.version for engine in engines), 0
        return 0, parts.progress.num_settled(parts.trained_nodes)
