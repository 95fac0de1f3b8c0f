"""Events into the state machine and instructions out of it. Plain frozen rows."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Refusal(enum.StrEnum):
    """Why a sample or group left the run untrained."""

    KEEP = "keep"
    """A `keep` node said no."""
    FAILED = "failed"
    """A per-sample or per-group body raised, after its retries."""
    TIMEOUT = "timeout"
    """A body or an episode ran out of time."""
    SMALL_GROUP = "small_group"
    """Too few members of its group were left."""
    STALE = "stale"
    """Its oldest token was older than the certificate allows (age rule)."""
    QUEUE_FULL = "queue_full"
    """More groups were accepted than may wait, and it was the oldest."""

    @property
    def is_drop(self) -> bool:
        """Whether a rule about time took it, and not what it is."""
        return self in (Refusal.STALE, Refusal.QUEUE_FULL)


# ---------------------------------------------------------------------------------- events
@dataclass(frozen=True)
class Started:
    """The workers are ready; the first instructions follow."""


@dataclass(frozen=True)
class SampleDone:
    """A stream's source finished one sample; `oldest` is the least version among its tokens."""

    stream: str
    sample: int
    oldest: int = -1


@dataclass(frozen=True)
class NodeDone:
    """A node finished for a sample id, a group id or a step, by its level."""

    node: str
    key: int
    keep: bool = True


@dataclass(frozen=True)
class NodeFailed:
    """A source, sample or group body gave up on a sample or group: a refusal with a reason."""

    node: str
    key: int
    reason: Refusal
    message: str = ""


@dataclass(frozen=True)
class Exhausted:
    """The dataset had no row for this group; the group does not exist."""

    stream: str
    group: int


@dataclass(frozen=True)
class Awake:
    """An engine confirmed that it generates with `version`."""

    replica: str
    version: int


@dataclass(frozen=True)
class Asleep:
    """An engine confirmed that it stopped; its unfinished samples are kept and stay running."""

    replica: str


@dataclass(frozen=True)
class StopRequested:
    """The user asked the run to end: nothing new starts, what runs finishes."""


@dataclass(frozen=True)
class Published:
    """New weights of an engine lie ready for it; whoever trains them may change its own."""

    replica: str
    version: int


Event = Started | SampleDone | NodeDone | NodeFailed | Exhausted | Awake | Asleep | Published | StopRequested


# ----------------------------------------------------------------------------- instructions
@dataclass(frozen=True)
class OpenGroup:
    """Take the next row of the stream's dataset and start the source for these samples."""

    stream: str
    group: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class RunSample:
    """Run a per-sample node."""

    node: str
    sample: int


@dataclass(frozen=True)
class RunGroup:
    """Run a per-group node on the members that are left."""

    node: str
    group: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class RunStreamingInference:
    """Run a model on samples or groups that have arrived. The node reports on each of its keys."""

    node: str
    number: int
    """How many firings its devices had before."""
    keys: tuple[int, ...]
    """Samples or groups, by the node's level, in order of arrival."""
    samples: tuple[int, ...]
    """All of them, those of a group together."""


@dataclass(frozen=True)
class Refuse:
    """Samples that left the run (all that is left of a group, or one member): free their data.

    Those that are still generated are aborted: each reports once more, whatever, and nothing follows.
    """

    stream: str
    group: int
    samples: tuple[int, ...]
    node: str
    reason: Refusal
    message: str = ""
    """What the body failed with, where it did."""


@dataclass(frozen=True)
class Accept:
    """What is left of a group passed all its nodes and waits to be bound: nothing to do, but to know."""

    stream: str
    group: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class FormBatch:
    """Bind groups (ids sorted) to a step of a stream; for side streams, the evaluation's end."""

    stream: str
    step: int
    samples: tuple[int, ...]
    groups: tuple[int, ...]


@dataclass(frozen=True)
class RunBatch:
    """Fire a batch node for a step."""

    node: str
    step: int


@dataclass(frozen=True)
class Publish:
    """Make a copy of weights that an engine with devices of its own can load while they change.

    It comes before whatever else is asked of the devices that hold them, and the engine goes on meanwhile.
    """

    replica: str
    version: int


@dataclass(frozen=True)
class Wake:
    """Give an engine the weights of `version` (no transfer when it has them) and let it run.

    What was published for it is what it loads.
    It resumes what it was interrupted in before it takes fresh samples, which come after `Awake`.
    """

    replica: str
    version: int


@dataclass(frozen=True)
class Sleep:
    """Interrupt an engine, keeping unfinished samples, and free its device for others.

    Where samples are not to be interrupted it comes when there are none.
    """

    replica: str


@dataclass(frozen=True)
class StepDone:
    """Every batch node of a step is done."""

    step: int


@dataclass(frozen=True)
class Finish:
    """The run is over."""

    reason: str
    error: bool = False


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
    | Finish
)
