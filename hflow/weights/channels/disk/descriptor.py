"""Files as a weight channel."""

from __future__ import annotations

from typing import Any

from hflow.planner.plan.channels import ChannelKind, ChannelTraits, RouteFacts
from hflow.planner.plan.hardware import GIB


def _open(settings: Any) -> Any:
    from hflow.weights.channels.disk.channel import DiskChannel

    return DiskChannel(settings)


def _prefer(facts: RouteFacts) -> str | None:
    """Return a reason if a version does not fit into the object store, as far as its size is known."""
    if facts.store_bytes is None or facts.stored_bytes <= facts.store_bytes:
        return None
    return (
        f"trainers publish {facts.stored_bytes / GIB:.1f} GiB per machine, but the object store has only "
        f"about {facts.store_bytes / GIB:.1f} GiB"
    )


CHANNEL = ChannelKind(
    name="disk",
    traits=ChannelTraits("disk"),
    factory=_open,
    prefer=_prefer,
    priority=10,
)
