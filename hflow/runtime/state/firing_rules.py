"""When nodes fire and evaluations are due: `every`, `after`, and the last step."""

from __future__ import annotations

from hflow.planner.ir import ScheduledNode, ScheduledStream


def on_beat(step: int, every: int, after: int) -> bool:
    """Whether `step` is `after`, or any whole number of `every` later."""
    return step >= after and (step - after) % every == 0


def node_fires(node: ScheduledNode, step: int, num_steps: int) -> bool:
    """Whether a batch node of the trained stream fires at a step; there are `num_steps` of them."""
    if step >= num_steps:
        return False
    return on_beat(step, node.every, node.after) or (node.at_end and step == num_steps - 1)


def evaluation_due(stream: ScheduledStream, version: int, num_steps: int) -> bool:
    """Whether a side stream is evaluated at a version; at the end it always is."""
    return version == num_steps or on_beat(version, stream.every, stream.after)


def next_evaluation(stream: ScheduledStream, last: int, num_steps: int) -> int | None:
    """The first version after `last` at which a side stream is due; None when the end is past."""
    if last >= num_steps:
        return None
    late = max(0, last + 1 - stream.after)
    beat = stream.after + -(-late // stream.every) * stream.every
    return min(beat, num_steps)
