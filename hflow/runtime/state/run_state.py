"""`RunState`: events in, instructions out. Pure: no clock, no I/O, no threads, no randomness.

The executor performs the instructions with real workers, the simulator on a virtual clock; what
they report comes back as events. The pieces, from the inside out:

- `groups`, `stream_state`: one group, one stream; `rollout` and `evaluation`: what the trained and
  the side streams do with finished groups; `staleness`: the admission formula and the age rule;
- `stations`: devices on which models work on what arrives;
- `progress`: steps and versions; `copies`, `devices`: engines, and the cyclic order of device groups;
- `binding`, `weights`, `batch_nodes`, `admission`: the four decisions (which groups a step gets, who
  gets weights, which node fires, which group is opened), taken after each event in a fixed order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hflow.graph.ir import Level
from hflow.metrics import declare
from hflow.planner.ir import Schedule
from hflow.runtime.events import (
    Asleep,
    Awake,
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
from hflow.runtime.state.batch_nodes import finish_node, fire_batch_nodes, settle_batch_nodes
from hflow.runtime.state.device_state import EngineState
from hflow.runtime.state.staleness import LOOK_AHEAD
from hflow.runtime.state.state_parts import StateParts, assemble
from hflow.runtime.state.stream_state import StreamState
from hflow.runtime.state.weight_updates import update_engines

# -------------------- When accepted groups are bound to a step.
# With eta = 0 a batch is bound as soon as it is full: all that is admitted trains before the engines get new
# weights, so nobody is overtaken. Else groups wait until the step asks for them, and the oldest go first. A
# sample that takes long is overtaken by fresh ones meanwhile, and the later they are bound, the more steps it
# has to catch up before it is too old.
#
# A step asks when a device group has nothing left to do before it. So nodes of the next step run beside the
# writers of this one where they are placed apart; but no further ahead than that, or a fast group would bind
# everything early.


def may_bind(data: StateParts) -> bool:
    """Whether the next batch can be formed now."""
    return data.rollout.is_formable and (not _waits(data) or _is_asked_for(data))


def _waits(data: StateParts) -> bool:
    return bool(data.rollout.models) and data.schedule.settings.max_staleness > 0


def _is_asked_for(data: StateParts) -> bool:
    step = data.progress.formed
    if step > data.progress.least_version(data.rollout.models) + LOOK_AHEAD:
        return False
    return any(device.cycle == step and device.running is None for device in data.devices)


NUM_RUNNING = declare(
    "rollout/running",
    "groups",
    "open groups: generated, or worked on by sample and group nodes",
    live="last",
)
NUM_QUEUED = declare("rollout/queued", "groups", "accepted groups that wait for their batch", live="last")
NUM_ACCEPTED = declare("rollout/accepted", "groups", "groups accepted since the run's start", live="last")
VERSION = declare(
    "rollout/version", "version", "version of the weights that new samples are generated with", live="last"
)

HISTORY = 20
"""Events that an assertion's text carries."""


class RunState:
    """The state machine of one run.

    An event that cannot happen (an unknown node, a second completion) is a bug of ours and raises
    an `AssertionError` whose text carries the last events. After `Finish` events are ignored.

    Args:
        schedule: the part of the plan that says what fires when.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._out: list[Instruction] = []
        self.parts = assemble(schedule, self._out.append)
        self.admission = Admission(self.parts)
        self.finished: Finish | None = None
        self.stopping = False
        self._started = False
        self._history: deque[Event] = deque(maxlen=HISTORY)
        self._streams = {stream.stream.name: stream for stream in self.parts.streams}
        self._stream_of = {stream.stream.source: stream for stream in self.parts.streams}
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
            Started: self._on_started,
            StopRequested: self._on_stop,
        }

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; return what to do now, in order."""
        if self.finished is not None:
            return []
        self._history.append(event)
        try:
            self._handlers[type(event)](event)
            if self.finished is None:
                self.parts.stations.fire(self._stream_of)
        except AssertionError as bug:
            events = "\n  ".join(str(event) for event in self._history)
            raise AssertionError(f"{bug}; last events:\n  {events}") from bug
        instructions = self._out.copy()
        self._out.clear()
        return instructions

    def rollout_counts(self) -> dict[str, float]:
        """Return the present counts of groups, and the version of the weights that generate new samples."""
        rollout = self.parts.rollout
        counts: dict[str, float] = {
            NUM_RUNNING.name: len(rollout.groups),
            NUM_QUEUED.name: len(rollout.queue),
            NUM_ACCEPTED.name: rollout.num_accepted,
        }
        if self.parts.engines_of[rollout.stream.name]:
            counts[VERSION.name] = self.parts.engine_version(rollout.stream.name)
        return counts

    # ------------------------------------------------------------------ events
    def _on_started(self, event: Started) -> None:
        assert not self._started, "the run started twice"
        self._started = True
        self._advance()

    def _on_sample_done(self, event: SampleDone) -> None:
        stream = self._streams[event.stream]
        if self.stopping:
            stream.discard_sample(event.sample)
        else:
            stream.sample_done(event.sample, event.oldest)
        self._after_sample_event(stream)

    def _on_node_done(self, event: NodeDone) -> None:
        if event.node in self.parts.progress.settled:
            finish_node(event.node, event.key, self.parts)
            self._advance()
            return
        stream = self._stream_of.get(event.node)
        assert stream is not None, f"there is no node {event.node}"
        assert event.node not in self._sources, f"{event.node} is a source: it reports samples"
        self.parts.stations.done(event.node, event.key)
        if self.stopping:
            stream.discard_node(event.node, event.key)
        else:
            stream.node_done(event.node, event.key, event.keep)
        self._after_sample_event(stream)

    def _on_node_failed(self, event: NodeFailed) -> None:
        stream = self._stream_of.get(event.node)
        assert stream is not None, f"{event.node} is no source, sample or group node that could fail"
        self.parts.stations.done(event.node, event.key)
        if event.node in self._sources:
            if self.stopping:
                stream.discard_sample(event.key)
            else:
                stream.sample_failed(event.key, event.reason, event.message)
        elif self.stopping:
            stream.discard_node(event.node, event.key)
        else:
            stream.node_failed(event.node, event.key, event.reason, event.message)
        self._after_sample_event(stream)

    def _on_exhausted(self, event: Exhausted) -> None:
        stream = self._streams[event.stream]
        stream.exhaust(event.group)
        self._after_sample_event(stream)

    def _on_awake(self, event: Awake) -> None:
        engine = self.parts.engines[event.replica]
        assert engine.state is EngineState.WAKING, f"{engine.name} was not told to wake"
        assert engine.target == event.version, f"{engine.name} woke with {event.version}, not {engine.target}"
        engine.state, engine.copy.version = EngineState.AWAKE, event.version
        self._advance()

    def _on_asleep(self, event: Asleep) -> None:
        engine = self.parts.engines[event.replica]
        assert engine.state is EngineState.SLEEPING, f"{engine.name} was not told to sleep"
        engine.state = EngineState.ASLEEP
        self._advance()

    def _on_published(self, event: Published) -> None:
        engine = self.parts.engines[event.replica]
        assert engine.is_publishing, f"nothing is published for {engine.name}"
        assert engine.target == event.version, f"{event.version} is published for {engine.name}"
        engine.is_publishing = False
        self._advance()

    def _on_stop(self, event: StopRequested) -> None:
        self.stopping = True
        self.parts.stations.clear(self._stream_of)
        self._advance()

    # ------------------------------------------------------------------ decisions
    def _after_sample_event(self, stream: StreamState) -> None:
        """Most events of samples change nothing but the room for more of them.

        So it is where more groups are accepted than a batch needs, and no step asks for one yet.
        """
        if self.stopping or stream.wants_decision or may_bind(self.parts):
            self._advance()
        else:
            self.admission.open_groups()

    def _advance(self) -> None:
        """Do everything that can be done now."""
        if self.stopping:
            self._wind_down()
            return
        while True:
            self._close_batches()
            if self.parts.rollout.is_refused_out:
                self._finish(self.parts.rollout.describe_refusals(), error=True)
                return
            self.admission.begin_evaluations()
            fire_batch_nodes(self.parts)
            if not may_bind(self.parts):  # a device group that goes on may ask for the next batch
                break
        update_engines(self.parts)
        self.admission.open_groups()
        if self._is_over():
            cut_short = self.parts.progress.num_steps < self.parts.schedule.num_steps
            self._finish("dataset exhausted" if cut_short else "done")

    def _close_batches(self) -> None:
        """Form the batches and end the evaluations that are complete."""
        rollout, progress = self.parts.rollout, self.parts.progress
        while may_bind(self.parts):
            rollout.form_batch()
        if rollout.is_dry:
            progress.num_steps = progress.formed
        for evaluation in self.parts.evaluations.values():
            if evaluation.is_complete:
                evaluation.finish()

    def _wind_down(self) -> None:
        """Start nothing; end when all that runs has reported. Samples in flight are left."""
        settle_batch_nodes(self.parts)
        engines_settled = all(engine.is_settled for engine in self.parts.engines.values())
        at_work = self.parts.progress.running or any(s.has_running_nodes for s in self.parts.streams)
        if engines_settled and not at_work:
            self._finish("stopped")

    def _is_over(self) -> bool:
        progress = self.parts.progress
        return (
            progress.reported == progress.num_steps + self.parts.has_side_nodes
            and all(device.cycle > progress.num_steps for device in self.parts.devices)
            and all(progress.num_steps in e.formed for e in self.parts.evaluations.values())
            and all(engine.is_settled for engine in self.parts.engines.values())
        )

    def _finish(self, reason: str, *, error: bool = False) -> None:
        self.finished = Finish(reason, error)
        self.parts.emit(self.finished)
