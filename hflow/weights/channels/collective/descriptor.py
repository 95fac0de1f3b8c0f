"""Broadcasts from device to device as a weight channel."""

from __future__ import annotations

from typing import Any

from hflow.base.devices import is_gpu
from hflow.planner.plan.channels import ChannelKind, ChannelTraits, RouteFacts


def _open(settings: Any) -> Any:
    from hflow.weights.channels.collective.channel import CollectiveChannel

    return CollectiveChannel(settings)


def _prefer(facts: RouteFacts) -> str | None:
    if is_gpu(facts.device) and not facts.is_one_process and not facts.shares_devices:
        return "NCCL broadcasts between devices"
    return None


CHANNEL = ChannelKind(
    name="collective",
    traits=ChannelTraits("device", needs_workers_apart=True),
    factory=_open,
    prefer=_prefer,
    priority=30,
    trial="new weights by broadcasts from device to device",
)
