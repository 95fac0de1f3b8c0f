"""Shared memory of one machine as a weight channel."""

from __future__ import annotations

from typing import Any

from hflow.planner.plan.channels import ChannelKind, ChannelTraits, RouteFacts


def _open(settings: Any) -> Any:
    from hflow.weights.channels.shared.channel import SharedChannel

    return SharedChannel(settings)


def _prefer(facts: RouteFacts) -> str | None:
    if facts.has_own_process and facts.num_machines == 1:
        return "the engines have processes of their own on this machine"
    return None


CHANNEL = ChannelKind(
    name="shared",
    traits=ChannelTraits("host", crosses_machines=False, is_near_on="cpu"),
    factory=_open,
    prefer=_prefer,
    priority=20,
)
