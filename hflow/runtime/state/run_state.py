"""`RunState`, the state machine of a run: `handle(event)` returns the instructions that follow.

It is pure: no clock, no I/O, no threads, no randomness. The executor performs the instructions with real
workers, the simulator on a virtual clock, and both send what happens back as events (`hflow.runtime.events`).

What there is, from the inside out:

- `groups`: one group of samples, and what its nodes wait for.
- `stream_state`: the open groups of one stream. `trained_stream` forms batches of finished groups;
  `evaluation` runs a side stream's dataset once per version.
- `streaming_inference`: queues of models that work on samples as they arrive.
- `progress`: steps, batches and model versions.
- `engine_weights`, `device_state`: generation engines, and the order of batch nodes on each device group.
- `checkpoints`: when the run can be saved, and its `snapshot`, from which another state machine can start.
- `state_parts`: all of the above, assembled from the plan's schedule.

What is decided after an event, in this order:

1. which batch is formed, and which evaluation is complete (`RunState._close_batches`, `may_form_batch`);
2. which evaluation begins (`admission`);
3. which weights are published and which batch nodes fire (`batch_nodes`, by `rules`);
4. which engines sleep and wake, with which weights (`weight_updates`);
5. which groups are opened (`admission`, by the formulas of `planner.plan.staleness` and `rules`).

Invariant: after every event, everything that can be done has been asked for, and nothing twice.
`invariants.check_invariants` states the rest, and property tests call it after every event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from hflow.graph.ir import Level
from hflow.metrics import declare
from hflow.planner.plan.rows import Schedule
from hflow.runtime.events import (
    Asleep,
    Awake,
    CheckpointDue,
    EngineBack,
    EngineLost,
    Event,
    Exhausted,
    Finish,
    Instruction,
    NodeDone,
    NodeFailed,
    Published,
    SampleDone,
    Started,
    StopRequested,
)
from hflow.runtime.state.admission import Admission
from hflow.runtime.state.batch_nodes import finish_batch_node, fire_batch_nodes
from hflow.runtime.state.checkpoints import (
    pending_checkpoint,
    request_checkpoint,
    restore,
    take_last_checkpoint,
)
from hflow.runtime.state.device_state import EnginePhase
from hflow.runtime.state.rules import LOOK_AHEAD
from hflow.runtime.state.snapshot import RunSnapshot
from hflow.runtime.state.state_parts import StateParts, assemble
from hflow.runtime.state.stream_state import StreamState
from hflow.runtime.state.weight_updates import can_lose, lose_engine, pause_engines, update_engines

NUM_RUNNING = declare(
    "rollout/running", "groups", "open groups: generated, or worked on by sample and group nodes", live="last"
)
NUM_QUEUED = declare("rollout/queued", "groups", "accepted groups that wait for their batch", live="last")
NUM_ACCEPTED = declare("rollout/accepted", "groups", "groups accepted since the run's start", live="last")
VERSION = declare(
    "rollout/version", "version", "version of the weights that new samples are generated with", live="last"
)

HISTORY_LENGTH = 20
"""Events that the message of an assertion lists."""


class RunState:
    """The state machine of one run.

    An event that cannot happen (an unknown node, a second completion) is a bug in hflow and raises an
    `AssertionError` that lists the last events. After `Finish`, events are ignored. Without a snapshot, where
    a run continues, it is at its beginning.

    Attributes:
        parts: the state.
        admission: opens groups.
        finished: the last instruction, once it was issued.
        is_ending: whether the run is to end before its last step, and all steps that had begun are complete.
    """

    def __init__(self, schedule: Schedule, snapshot: RunSnapshot | None = None) -> None:
        self._instructions: list[Instruction] = []
        self.parts = assemble(schedule, self._instructions.append)
        self.admission = Admission(self.parts)
        self.finished: Finish | None = None
        self._snapshot = snapshot
        self._started = False
        self.is_ending = False
        self._history: deque[Event] = deque(maxlen=HISTORY_LENGTH)
        self._streams = {stream.stream.name: stream for stream in self.parts.streams}
        self._stream_of = {stream.stream.source: stream for stream in self.parts.streams}
        """Source, sample node or group node -> its stream."""
        self._sources = frozenset(self._stream_of)
        for node in schedule.nodes:
            if node.level is not Level.BATCH:
                self._stream_of[node.name] = self._streams[node.stream]
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            SampleDone: self._on_sample_done,
            NodeDone: self._on_node_done,
            NodeFailed: self._on_node_failed,
            Exhausted: self._on_exhausted,
            Awake: self._on_awake,
            Asleep: self._on_asleep,
            Published: self._on_published,
            EngineLost: self._on_engine_lost,
            EngineBack: self._on_engine_back,
            Started: self._on_started,
            StopRequested: self._on_stop,
            CheckpointDue: self._on_checkpoint_due,
        }

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event and return what to do now, in order."""
        if self.finished is not None:
            return []
        self._history.append(event)
        try:
            self._handlers[type(event)](event)
            if self.finished is None:
                self.parts.streaming.run_waiting(self._stream_of)
        except AssertionError as bug:
            events = "\n  ".join(str(event) for event in self._history)
            raise AssertionError(f"{bug}; last events:\n  {events}") from bug
        instructions = self._instructions.copy()
        self._instructions.clear()
        return instructions

    # Queries
    @property
    def num_steps(self) -> int:
        """The steps of the run; fewer than planned, if its dataset ends before."""
        return self.parts.progress.num_steps

    def rollout_counts(self) -> dict[str, float]:
        """Return the present counts of groups, and the version of the weights that generate new samples."""
        trained = self.parts.trained
        counts: dict[str, float] = {
            NUM_RUNNING.name: len(trained.groups),
            NUM_QUEUED.name: len(trained.queue),
            NUM_ACCEPTED.name: trained.num_accepted,
        }
        if self.parts.engines_of[trained.stream.name]:
            counts[VERSION.name] = self.engine_version(trained.stream.name)
        return counts

    def num_generated(self) -> dict[str, int]:
        """Return stream -> samples that are finished for its next batch, or evaluation, if more are open."""
        return {name: stream.num_generated for name, stream in self._streams.items() if stream.groups}

    def engine_version(self, stream: str) -> int:
        """Return the version of the weights that generate a stream; -1 without an engine."""
        return self.parts.engine_version(stream)

    def can_lose_engine(self, replica: str) -> bool:
        """Return whether the run can continue while an engine is started again."""
        return can_lose(self.parts.engines[replica], self.parts)

    def is_last_checkpoint(self, snapshot: RunSnapshot) -> bool:
        """Return whether no checkpoint follows that of a snapshot."""
        return self.parts.progress.is_stopping or snapshot.steps == self.num_steps

    def generating(self, stream: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield each open group that has samples whose source has not reported, with these samples."""
        return self._streams[stream].generating()

    def abandoned(self, stream: str) -> frozenset[int]:
        """Return the samples that were refused while they were generated, and have not reported."""
        return frozenset(self._streams[stream].abandoned)

    def is_abandoned(self, stream: str, sample: int) -> bool:
        """Return whether a sample was refused while it was generated, and has not reported."""
        return sample in self._streams[stream].abandoned

    def movable_groups(self, stream: str) -> list[int]:
        """Return the open groups whose members are all being generated, in order of admission."""
        return self._streams[stream].movable_groups()

    def members_of(self, stream: str, group: int) -> frozenset[int]:
        """Return the remaining samples of a group; empty if it is not open."""
        return self._streams[stream].members_of(group)

    def remaining_samples(self, node: str, key: int) -> tuple[int, ...] | None:
        """Return the remaining samples of what a sample or group node works on; None if it was refused."""
        stream = self._stream_of[node]
        return None if stream.is_orphan(node, key) else stream.samples_of(node, key)

    # Events
    def _on_started(self, event: Started) -> None:
        assert not self._started, "the run started twice"
        self._started = True
        if self._snapshot is not None:
            restore(self._snapshot, self.parts)
        self._decide()

    def _on_sample_done(self, event: SampleDone) -> None:
        stream = self._streams[event.stream]
        if self.is_ending:
            stream.note_sample(event.sample, event.oldest)
        else:
            stream.sample_done(event.sample, event.oldest)
        self._decide_after(stream)

    def _on_node_done(self, event: NodeDone) -> None:
        if event.node in self.parts.progress.last_settled:
            finish_batch_node(event.node, event.key, self.parts)
            self._decide()
            return
        stream = self._stream_of.get(event.node)
        assert stream is not None, f"there is no node {event.node}"
        assert event.node not in self._sources, f"{event.node} is a source: it reports samples"
        self.parts.streaming.done(event.node, event.key)
        if self.is_ending and event.keep:
            stream.note_node(event.node, event.key)
        elif self.is_ending:
            stream.discard_node(event.node, event.key)
        else:
            stream.node_done(event.node, event.key, event.keep)
        self._decide_after(stream)

    def _on_node_failed(self, event: NodeFailed) -> None:
        stream = self._stream_of.get(event.node)
        assert stream is not None, f"{event.node} failed, but it is no source, sample node or group node"
        self.parts.streaming.done(event.node, event.key)
        # In a run that is stopping, what fails begins again when it is resumed. Evaluations must end before.
        is_stopping = self.parts.progress.is_stopping and stream is self.parts.trained
        if event.node in self._sources:
            if self.is_ending or is_stopping:
                stream.discard_sample(event.key)
            else:
                stream.sample_failed(event.key, event.reason, event.message)
        elif self.is_ending or is_stopping:
            stream.discard_node(event.node, event.key)
        else:
            stream.node_failed(event.node, event.key, event.reason, event.message)
        self._decide_after(stream)

    def _on_exhausted(self, event: Exhausted) -> None:
        stream = self._streams[event.stream]
        stream.exhaust(event.group)
        self._decide_after(stream)

    def _on_awake(self, event: Awake) -> None:
        engine = self.parts.engines[event.replica]
        assert engine.phase is EnginePhase.WAKING, f"{engine.name} woke without being asked to"
        assert engine.target == event.version, f"{engine.name} woke with {event.version}, not {engine.target}"
        engine.phase, engine.weights.version = EnginePhase.AWAKE, event.version
        self._decide()

    def _on_asleep(self, event: Asleep) -> None:
        engine = self.parts.engines[event.replica]
        assert engine.phase is EnginePhase.FALLING_ASLEEP, f"{engine.name} slept without being asked to"
        engine.phase = EnginePhase.ASLEEP
        self._decide()

    def _on_published(self, event: Published) -> None:
        engine = self.parts.engines[event.replica]
        assert engine.is_publishing, f"nothing is published for {engine.name}"
        assert engine.target == event.version, (
            f"version {event.version} was published for {engine.name}, not {engine.target}"
        )
        engine.is_publishing = False
        self._decide()

    def _on_engine_lost(self, event: EngineLost) -> None:
        lose_engine(self.parts.engines[event.replica], self.parts)
        self._decide()

    def _on_engine_back(self, event: EngineBack) -> None:
        engine = self.parts.engines[event.replica]
        assert engine.is_lost, f"{engine.name} came back, but was not lost"
        engine.is_lost = False
        self._decide()

    def _on_stop(self, event: StopRequested) -> None:
        progress = self.parts.progress
        progress.is_stopping, progress.problem = True, progress.problem or event.problem
        self._decide()

    def _on_checkpoint_due(self, event: CheckpointDue) -> None:
        request_checkpoint(self.parts)
        self._decide()

    # Decisions
    def _decide_after(self, stream: StreamState) -> None:
        """Decide what follows from an event of a sample: in most cases only that there is room for more."""
        if self.is_ending or stream.needs_decision or may_form_batch(self.parts):
            self._decide()
        else:
            self.admission.open_groups()

    def _decide(self) -> None:
        """Decide everything that can be decided now."""
        if self.is_ending:
            self._end()
            return
        while True:
            self._close_batches()
            if self.parts.trained.has_too_many_refusals and self.parts.progress.problem is None:
                self._stop_refusing()
            self.admission.begin_evaluations()
            last_checkpoint = self.parts.progress.last_checkpoint
            fire_batch_nodes(self.parts)
            # A pointer may have reached the next batch; a checkpoint may have held back evaluations.
            if not may_form_batch(self.parts) and last_checkpoint == self.parts.progress.last_checkpoint:
                break
        if self.parts.progress.is_stopping and self._has_completed_steps():
            self.is_ending = True
            self.parts.streaming.clear(self._stream_of)
            self._end()
            return
        update_engines(self.parts)
        self.admission.update_limit()
        self.admission.open_groups()
        if self._is_over():
            take_last_checkpoint(self.parts)
            ended_early = self.parts.progress.num_steps < self.parts.schedule.num_steps
            self._finish("dataset exhausted" if ended_early else "done")

    def _stop_refusing(self) -> None:
        """Let the run end as if the user had asked for it, but with an error."""
        trained, progress = self.parts.trained, self.parts.progress
        progress.problem, progress.is_stopping = trained.describe_refusals(), True
        trained.forget_refusals()  # a run that continues from the last checkpoint starts to count again

    def _close_batches(self) -> None:
        """Form the batches that can be formed and finish the evaluations that are complete."""
        trained, progress = self.parts.trained, self.parts.progress
        while may_form_batch(self.parts):
            trained.form_batch()
        if trained.cannot_fill_batch:
            progress.num_steps = progress.num_formed
        for evaluation in self.parts.evaluations.values():
            if evaluation.is_complete:
                evaluation.finish()

    def _has_completed_steps(self) -> bool:
        """Return whether all nodes are done with the batches that are formed."""
        progress = self.parts.progress
        return progress.num_reported >= progress.num_formed and not progress.running

    def _end(self) -> None:
        """Start nothing; when everything that runs has reported, take a checkpoint and finish.

        Samples in flight become part of the checkpoint, so engines are interrupted.
        """
        parts = self.parts
        if not all(engine.is_confirmed for engine in parts.engines.values()):
            return
        pause_engines(parts)
        are_asleep = all(engine.phase is EnginePhase.ASLEEP for engine in parts.engines.values())
        if not are_asleep or any(stream.has_running_nodes for stream in parts.streams):
            return
        for evaluation in parts.evaluations.values():
            if evaluation.active is not None and evaluation.active < parts.progress.num_formed:
                evaluation.abandon()
        take_last_checkpoint(parts)
        problem = parts.progress.problem
        self._finish(problem or "stopped", error=problem is not None)

    def _is_over(self) -> bool:
        parts, progress = self.parts, self.parts.progress
        return (
            progress.num_reported == progress.num_steps + parts.has_side_nodes
            and all(device.cycle > progress.num_steps for device in parts.devices)
            and all(progress.num_steps in e.formed for e in parts.evaluations.values())
            and all(engine.is_confirmed for engine in parts.engines.values())
        )

    def _finish(self, reason: str, *, error: bool = False) -> None:
        self.finished = Finish(reason, error)
        self.parts.emit(self.finished)


def may_form_batch(parts: StateParts) -> bool:
    """Return whether the next batch can be formed now.

    With eta = 0 (`max_staleness`) a batch is formed as soon as it is full: all that is admitted trains before
    the engines get new weights, so no sample is overtaken. Otherwise groups wait until the step needs them,
    and the oldest go first: a sample that takes long is overtaken by newer ones, and the later batches are
    formed, the more steps it has before it is too old.

    A step needs its batch when a device group has nothing left to do before it. So nodes of the next step run
    in parallel with those that change the weights of this step, if they are on other devices. They run no
    further ahead than that, or a fast device group would form all batches early.

    While a checkpoint is pending, no batch is formed, so that nothing of a later step begins.
    """
    return (
        parts.trained.can_form_batch
        and not parts.progress.is_stopping
        and pending_checkpoint(parts) is None
        and _step_needs_batch(parts)
    )


def _step_needs_batch(parts: StateParts) -> bool:
    """Return whether a batch need not wait, or its step needs it."""
    step = parts.progress.num_formed
    if not parts.trained.models or parts.schedule.settings.max_staleness == 0:
        return True
    if step > parts.progress.min_version(parts.trained.models) + LOOK_AHEAD:
        return False
    return any(device.cycle == step and device.running is None for device in parts.devices)
