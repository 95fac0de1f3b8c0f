"""A package that adds a weight channel and a tracker to hflow, as any installed package can."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hflow.planner.plan.channels import ChannelKind, ChannelTraits
from hflow.trackers.interface import Tracker, TrackerKind

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


class FileTracker(Tracker):
    """Append the number of each step to a file."""

    key = "report.trackers.file"

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{step}\n")


TRACKER = TrackerKind("file", FileTracker)
