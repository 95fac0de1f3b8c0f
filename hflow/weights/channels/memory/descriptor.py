"""The memory of one process as a weight channel."""

from __future__ import annotations

from typing import Any

from hflow.planner.plan.channels import ChannelKind, ChannelTraits


def _open(settings: Any) -> Any:
    from hflow.weights.channels.memory.channel import MemoryChannel

    return MemoryChannel(settings)


CHANNEL = ChannelKind(
    name="memory",
    traits=ChannelTraits("process", crosses_machines=False),
    factory=_open,
)
