"""`RunSnapshot`: the state machine between two steps, as plain values from which another one can start.

It is taken when all nodes of a step are settled and nothing of a later step has begun except generation
(`checkpoints`). So it consists of counters, and of groups that are in no batch yet. It does not name engines,
devices or workers: those that continue may be others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemberSnapshot:
    """A sample that is still part of its group."""

    sample: int
    oldest: int
    """Lowest version among its generated tokens; until it is generated, the version it was admitted with."""
    done: tuple[str, ...]
    """The source and sample nodes that are done with it. Without its source it is still generated."""


@dataclass(frozen=True)
class GroupSnapshot:
    """A group that is open, or accepted and in no batch yet."""

    number: int
    members: tuple[MemberSnapshot, ...]
    done: tuple[str, ...] = ()
    """Group nodes that are done with it."""
    is_accepted: bool = False
    """Whether it has passed all nodes and waits for its batch, or for the end of its evaluation."""


@dataclass(frozen=True)
class StreamSnapshot:
    """A root stream."""

    stream: str
    next_group: int
    """Id of the group that is opened next. On the trained stream it is also the place in the dataset."""
    groups: tuple[GroupSnapshot, ...]
    """In order of admission."""

    @property
    def finished(self) -> tuple[int, ...]:
        """Samples whose source is done, in ascending order."""
        return tuple(sorted(m.sample for group in self.groups for m in group.members if m.done))

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Samples that are still generated, in ascending order."""
        return tuple(sorted(m.sample for group in self.groups for m in group.members if not m.done))


@dataclass(frozen=True)
class EvaluationSnapshot:
    """What a side stream knows besides its groups."""

    first_group: int
    """The group that reads the first row of the dataset in the present or next evaluation."""
    active: int | None
    """The version that is being evaluated."""
    last: int
    """The highest version whose evaluation has begun."""
    formed: tuple[int, ...]
    """Versions whose evaluation is complete."""
    num_groups: int | None
    """Groups of the dataset; None until the first evaluation has reached its end."""


@dataclass(frozen=True)
class RunSnapshot:
    """Everything that a run's decisions depend on after some number of completed steps."""

    steps: int
    """Completed steps, which is also the version of every model."""
    num_refused: int
    """Groups of the trained stream refused since the last batch was formed."""
    streams: tuple[StreamSnapshot, ...]
    """The trained stream first."""
    evaluations: tuple[tuple[str, EvaluationSnapshot], ...]
    """By side stream."""
    last_fired: tuple[tuple[str, int], ...]
    """Batch node -> the last step at which it fired."""
    streaming_runs: tuple[tuple[str, int], ...] = ()
    """Queue of device groups that run models on arriving samples -> how many times they have."""
