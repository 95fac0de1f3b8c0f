"""At which steps nodes fire and evaluations are due: `every`, `after`, and the last step.

All rules are pure functions of the step and the number of steps.
"""

from __future__ import annotations

from hflow.planner.ir import ScheduledNode, ScheduledStream


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
