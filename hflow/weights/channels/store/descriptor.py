"""Ray's object store as a weight channel."""

from __future__ import annotations

from typing import Any

from hflow.planner.plan.channels import ChannelKind, ChannelTraits, RouteFacts


def _open(settings: Any) -> Any:
    from hflow.weights.channels.store.channel import StoreChannel

    return StoreChannel(settings)


def _prefer(facts: RouteFacts) -> str:
    return "memory that processes share"


CHANNEL = ChannelKind(
    name="store",
    traits=ChannelTraits("store", is_fetched_by_each_machine=True, needs_ray=True),
    factory=_open,
    prefer=_prefer,
    priority=0,
    trial="new weights through Ray's object store",
)
