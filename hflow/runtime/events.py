"""What enters the state machine (events) and what it decides (instructions), as frozen rows of plain values.

`RunState.handle` maps an event to instructions. The executor (or the simulator, on a virtual clock) sends
the events and performs the instructions. Each class says who sends it, or what performing it means, and
which events follow.

Those of single samples are tuples, which take a third of the time to make.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from hflow.runtime.state.snapshot import RunSnapshot
from hflow.types.engine import SleepLevel


class Refusal(enum.StrEnum):
    """Why a sample or group left the run before it was trained."""

    KEEP = "keep"
    """A node returned `keep=False`."""
    FAILED = "failed"
    """A body of a sample or group raised an exception in its last attempt."""
    TIMEOUT = "timeout"
    """A body or an episode exceeded its time limit."""
    SMALL_GROUP = "small_group"
    """Too few other members of its group remained."""
    STALE = "stale"
    """The oldest token was older than the age rule allows."""
    QUEUE_FULL = "queue_full"
    """More groups were accepted than may wait for their batch, and its group was the oldest."""
    STOPPED = "stopped"
    """The run was stopped during an evaluation of weights that have changed meanwhile."""

    @property
    def is_drop(self) -> bool:
        """Whether the sample took too long, whatever it contains. Such samples count as dropped."""
        return self in (Refusal.STALE, Refusal.QUEUE_FULL, Refusal.STOPPED)


# Events
@dataclass(frozen=True)
class Started:
    """All workers are ready. Sent once, before every other event."""


class SampleDone(NamedTuple):
    """A stream's source finished a sample. Sent by the sample's worker, also for a refused sample."""

    stream: str
    sample: int
    oldest: int = -1
    """The lowest version among its generated tokens; -1 where none was generated."""


class NodeDone(NamedTuple):
    """A node is done. Answers `RunSample`, `RunGroup`, `RunBatch` and, per key, `RunStreamingInference`."""

    node: str
    key: int
    """The sample, the group or the step, by the node's level."""
    keep: bool = True
    """False refuses the sample or group."""


@dataclass(frozen=True)
class NodeFailed:
    """A source, sample node or group node failed in its last attempt. Its sample or group is refused."""

    node: str
    key: int
    """The sample or group."""
    reason: Refusal
    message: str = ""
    """The body's error."""


@dataclass(frozen=True)
class Exhausted:
    """The dataset has no row for this group. Answers `OpenGroup`, in the place of its `SampleDone`s."""

    stream: str
    group: int


@dataclass(frozen=True)
class Awake:
    """An engine generates with the weights of `version`. Answers `Wake`."""

    replica: str
    version: int


@dataclass(frozen=True)
class Asleep:
    """An engine has stopped; its unfinished samples are kept. Answers `Sleep`."""

    replica: str


@dataclass(frozen=True)
class Published:
    """The weights of an engine are copied, and nodes may change them from now on. Answers `Publish`."""

    replica: str
    version: int


@dataclass(frozen=True)
class EngineLost:
    """A worker of an engine with devices of its own has failed; the engine is being started again.

    What was asked of the engine is not answered any more. Its samples are in flight as before: they continue
    or begin again on the engine that takes its place. Sent only if `weight_updates.can_lose` allows it.
    """

    replica: str


@dataclass(frozen=True)
class EngineBack:
    """An engine that was lost has been started again. It has no weights, and sleeps."""

    replica: str


@dataclass(frozen=True)
class StopRequested:
    """The run is to end: steps whose batch is formed are completed, and nothing new starts."""

    problem: str | None = None
    """Why it ends with an error; None: the user asked for it."""


@dataclass(frozen=True)
class CheckpointDue:
    """It is time for a checkpoint. It is taken after a step that has not begun yet."""


Event = (
    Started
    | SampleDone
    | NodeDone
    | NodeFailed
    | Exhausted
    | Awake
    | Asleep
    | Published
    | EngineLost
    | EngineBack
    | StopRequested
    | CheckpointDue
)


# Instructions
@dataclass(frozen=True)
class OpenGroup:
    """Take the next row of the stream's dataset and start the source for these samples.

    Answered by `SampleDone` or `NodeFailed` for each sample, or by one `Exhausted`.
    """

    stream: str
    group: int
    samples: tuple[int, ...]
    is_continued: bool = False
    """Whether the group was opened before the run was resumed: these samples continue where they were."""


class RunSample(NamedTuple):
    """Run the body of a sample node. Answered by `NodeDone` or `NodeFailed`."""

    node: str
    sample: int


@dataclass(frozen=True)
class RunGroup:
    """Run the body of a group node on the remaining members. Answered by `NodeDone` or `NodeFailed`."""

    node: str
    group: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class RunStreamingInference:
    """Run a model on samples or groups that have arrived. Answered by one `NodeDone` for each key."""

    node: str
    number: int
    """How many times the node's devices have run a model before."""
    keys: tuple[int, ...]
    """Samples or groups, by the node's level, in order of arrival."""
    samples: tuple[int, ...]
    """All samples, those of a group together."""


@dataclass(frozen=True)
class Refuse:
    """Free the data of samples that left the run: all remaining members of a group, or some of them.

    Samples that are still generated are aborted. Each of them reports once more, and its report is ignored.
    """

    stream: str
    group: int
    samples: tuple[int, ...]
    node: str
    """The node that refused them, or the source where they took too long."""
    reason: Refusal
    message: str = ""
    """The error of the node's body, if it failed."""


@dataclass(frozen=True)
class Accept:
    """Note that the remaining members of a group have passed all nodes. They wait for their batch."""

    stream: str
    group: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class FormBatch:
    """Make a batch of these groups: the batch of a step or, on a side stream, all of an evaluation."""

    stream: str
    step: int
    """The step; on a side stream, the version that was evaluated."""
    samples: tuple[int, ...]
    groups: tuple[int, ...]
    """In ascending order."""


@dataclass(frozen=True)
class RunBatch:
    """Run a batch node for a step. Answered by `NodeDone`."""

    node: str
    step: int


@dataclass(frozen=True)
class Publish:
    """Copy weights to where an engine with its own devices can load them later. Answered by `Published`.

    The devices that hold the weights make the copy before anything they are asked to do later, so nodes that
    change the weights may be started at once. The engine continues to generate meanwhile.
    """

    replica: str
    version: int


@dataclass(frozen=True)
class Wake:
    """Load the weights of `version` into an engine and start it. Answered by `Awake`.

    The engine loads what was published for it, if anything was. Nothing is loaded if it has that version. It
    first continues its interrupted samples; new samples come after `Awake`.
    """

    replica: str
    version: int


@dataclass(frozen=True)
class Sleep:
    """Interrupt an engine, keep its unfinished samples, and free its devices. Answered by `Asleep`.

    Where samples are not to be interrupted, this is sent when the engine has none.
    """

    replica: str
    level: SleepLevel
    """What the engine keeps. With `DROP_WEIGHTS`, the next `Wake`, if any, has a higher version."""


@dataclass(frozen=True)
class StepDone:
    """Report a step: every batch node is done with it. Its data is no longer needed."""

    step: int


@dataclass(frozen=True)
class TakeCheckpoint:
    """Save the run as it is now.

    Every batch node is done with the snapshot's steps, and nodes that save models have saved them.
    """

    snapshot: RunSnapshot


@dataclass(frozen=True)
class Finish:
    """End the run. No instruction follows."""

    reason: str
    error: bool = False
    """Whether `reason` is an error."""


Instruction = (
    OpenGroup
    | RunSample
    | RunGroup
    | RunStreamingInference
    | Refuse
    | Accept
    | FormBatch
    | RunBatch
    | Publish
    | Wake
    | Sleep
    | StepDone
    | TakeCheckpoint
    | Finish
)
