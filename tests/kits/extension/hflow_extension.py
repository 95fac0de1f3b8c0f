"""A package that adds a weight channel to hflow, as any installed package can."""

from __future__ import annotations

from typing import Any

from hflow.planner.plan.channels import ChannelKind, ChannelTraits

SENT: list[tuple[int, ...]] = []
"""The receivers of each bucket that was sent."""


def _open(settings: Any) -> Any:
    from hflow.weights.channels.memory.channel import MemoryChannel

    class MailboxChannel(MemoryChannel):
        def send(self, receivers: Any, bucket: Any) -> Any:
            SENT.append(tuple(receivers))
            return super().send(receivers, bucket)

    return MailboxChannel(settings)


CHANNEL = ChannelKind("mailbox", ChannelTraits("host", crosses_machines=False), _open)
