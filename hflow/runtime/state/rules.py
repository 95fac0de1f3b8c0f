"""Rules of the state machine: when nodes fire, how many groups may be admitted, and how old a sample may be.

`EngineWeights` holds the versions of the weights that one generation engine has and loads next.

Firing. `every`, `after` and the last step decide, by pure functions of the step and the number of steps.

Staleness counts groups (a prompt with its G samples), as `batch` does. Only `free_samples` counts samples,
and is rounded down to groups. B is the batch, eta is `max_staleness`, and engines get new weights
every `s = sync_every` steps, so that an engine with the weights of `version` has had
`syncs = version // s` updates.

Admission. The number of groups that may be opened now is

    capacity = min(free_samples // G,  floor((eta + syncs + 1) * s * B) - (accepted + running))

`accepted` counts every group ever accepted, trained ones included. A group that was refused or dropped is
in neither term, so another group may be opened in its place at once. eta may be a fraction: with eta = 0.5
half of the groups of the next sync are admitted with the present weights.

Age. A group admitted with `syncs` updates is among the first `(eta + syncs + 1) * s * B`. If groups train in
the order of admission, it trains at step `ceil((eta + syncs + 1) * s) - 1` at the latest, and its oldest
token has at least version `syncs * s`. So the certified lag is

    L = ceil((eta + 1) * s) - 1          (eta = 0, s = 1: L = 0, the synchronous algorithm)

A slow sample can be overtaken, however, and train later than in its turn. So admission bounds the amount
of data, and not its age. The age rule (`is_stale`) ensures that L holds for every trained token.
"""

from __future__ import annotations

from dataclasses import dataclass

from hflow.planner.plan.rows import ScheduledNode, ScheduledStream


@dataclass(eq=False)
class EngineWeights:
    """Versions of one engine's weights; -1 before the first. Invariant: `version` <= `target`."""

    version: int = -1
    """Version that it generates with, or would generate with if it were awake."""
    target: int = -1
    """Version that it was given last: `version`, or newer weights that it has not loaded yet."""

    def reset(self) -> None:
        """Forget the weights of an engine that has failed, and those that it was given."""
        self.version = self.target = -1


def is_due(step: int, every: int, after: int) -> bool:
    """Return whether `step` is `after`, or a multiple of `every` steps later."""
    return step >= after and (step - after) % every == 0


def node_fires(node: ScheduledNode, step: int, num_steps: int) -> bool:
    """Return whether a batch node of the trained stream fires at a step of a run with `num_steps` steps."""
    if step >= num_steps:
        return False
    return is_due(step, node.every, node.after) or (node.at_end and step == num_steps - 1)


def evaluation_due(stream: ScheduledStream, version: int, num_steps: int) -> bool:
    """Return whether a side stream is evaluated at a version. The last version always is."""
    return version == num_steps or is_due(version, stream.every, stream.after)


def next_evaluation(stream: ScheduledStream, last: int, num_steps: int) -> int | None:
    """Return the first version after `last` at which a side stream is due; None after the last version."""
    if last >= num_steps:
        return None
    distance = max(0, last + 1 - stream.after)
    next_due = stream.after + -(-distance // stream.every) * stream.every
    return min(next_due, num_steps)


LOOK_AHEAD = 1
"""Batches beyond the current one that may be prepared where no trained weights are involved."""


def look_ahead_limit(steps_trained: int, batch: int) -> int:
    """Return the admission limit of a source that reads no trained weights, whose samples never age."""
    return (steps_trained + 1 + LOOK_AHEAD) * max(1, batch)


def capacity(free_samples: int, group_size: int, limit: int, admitted: int) -> int:
    """Return the number of groups that may be opened now.

    Args:
        free_samples: `max_concurrent` minus the samples in flight.
        limit: result of `ScheduleConfig.admission_limit` or `look_ahead_limit`.
        admitted: groups accepted so far plus groups running.
    """
    return max(0, min(free_samples // group_size, limit - admitted))


def is_stale(oldest: int, step: int, lag: int) -> bool:
    """Return whether a sample is too old to train at `step` with a largest lag.

    `oldest` is the version of its oldest token; -1 if no token was generated. Such samples never age.
    """
    return 0 <= oldest < step - lag
