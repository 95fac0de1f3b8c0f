"""The interface of channels. Each implementation has a file of its own."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hflow.planner.weights.weight_slices import Receivers
from hflow.weights.buckets import Bucket


@dataclass(frozen=True)
class ChannelSettings:
    """What both ends of a channel know."""

    name: str
    """A key of the registry in `hflow.weights.channels`."""
    owner: str
    """Names the sender and its receivers; different for each channel of a run."""
    directory: str
    """For files, on a disk that all machines share."""
    host: str = "127.0.0.1"
    """Address of this process's machine, as the other workers know it."""
    timeout: float = 600.0
    """Seconds after which a transfer that needs several processes at once fails."""
    near: str = ""
    """The channel from a worker to the engine on its own device; empty: the same as for all others."""
    relays: tuple[tuple[Receivers, int], ...] = ()
    """Receivers to which this process sends -> the one of them that passes its buckets on to the others. Only
    for channels that broadcast; other receivers take them from the sender."""

    @property
    def nearby(self) -> ChannelSettings:
        """The settings of the channel to the engine on the sender's device."""
        return replace(self, name=self.near, near="")


class NearHandle(NamedTuple):
    """The handle of a bucket that went through the channel with the settings `ChannelSettings.nearby`."""

    handle: Any


class WeightChannel(abc.ABC):
    """Carries buckets between processes. Any receiver can use the handles that a sender makes.

    The sender sends a bucket once for all its receivers, and frees it when they have loaded it.

    Args:
        settings: what both ends know.
    """

    def __init__(self, settings: ChannelSettings) -> None:
        self._settings = settings

    @abc.abstractmethod
    def send(self, receivers: Receivers, bucket: Bucket) -> Any:
        """Put a bucket where its receivers can take it; returns its handle, which can be pickled.

        The channel may keep the payload, which the caller does not change afterwards.
        """

    @abc.abstractmethod
    def receive(self, handle: Any, receiver: int) -> Bucket:
        """Return the bucket of a handle. Its payload may be read-only, and is valid until it is freed.

        Args:
            handle: what the sender's channel returned.
            receiver: which of the bucket's receivers this is.

        Raises:
            RunError: when it is missing or incomplete.
            WorkerFailureError: when the sender or another receiver does not take part.
        """

    def expect(self, handle: Any, receiver: int) -> None:  # noqa: B027 - most channels have nothing to begin
        """Begin with what `receive` will do, as far as no other receiver has to take part.

        The receiver receives the bucket or the one before it in its stream next. May be called again.

        Raises:
            WorkerFailureError: when the sender does not take part.
        """

    @abc.abstractmethod
    def free(self, handles: Iterable[Any]) -> None:
        """Free buckets that were sent; their receivers have loaded them, or never will."""

    def forget_receivers(self) -> None:  # noqa: B027 - most channels do not know them
        """Prepare the sending end for new processes in the place of receivers. Nothing sent is pending."""

    def close(self) -> None:  # noqa: B027 - most channels hold nothing
        """Free what the channel itself holds. Safe to call twice."""
