"""When accepted groups are bound to a step.

With eta = 0 a batch is bound as soon as it is full: all that is admitted trains before the engines get new
weights, so nobody is overtaken. Else groups wait until the step asks for them, and the oldest go first. A
sample that takes long is overtaken by fresh ones meanwhile, and the later they are bound, the more steps it
has to catch up before it is too old.

A step asks when a device group has nothing left to do before it. So nodes of the next step run beside the
writers of this one where they are placed apart; but no further ahead than that, or a fast group would bind
everything early.
"""

from __future__ import annotations

from hflow.runtime.run_data import RunData
from hflow.runtime.staleness import LOOK_AHEAD


def may_bind(data: RunData) -> bool:
    """Whether the next batch can be formed now."""
    return data.rollout.is_formable and (not _waits(data) or _is_asked_for(data))


def _waits(data: RunData) -> bool:
    return bool(data.rollout.models) and data.schedule.max_staleness > 0


def _is_asked_for(data: RunData) -> bool:
    step = data.progress.formed
    if step > data.progress.least_version(data.rollout.models) + LOOK_AHEAD:
        return False
    return any(device.cycle == step and device.running is None for device in data.devices)
