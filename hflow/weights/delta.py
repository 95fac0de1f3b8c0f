"""Buckets of changes: what differs from the version that the receivers have.

Both ends keep the payload of each bucket as it was last sent. The sender compares a new payload with it, word
by word (an entry of the smallest dtype in the bucket), and sends the places and values of the words that
differ. A bucket is sent whole if that is not larger, and always if the receivers may lack the version before.
The slices' checksums are those of the whole bucket, so a change that is lost or applied to another version is
found on arrival.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from hflow.base.errors import RunError
from hflow.planner.weights.weight_slices import Receivers
from hflow.weights.buckets import Bucket, BucketVersion
from hflow.weights.channels.interface import ChannelSettings

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PLACE_BYTES = 4


class DeltaSender:
    """Turns the buckets of one channel's sender, which `owner` identifies for its receivers, into changes."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._base: int | None = None
        """The version whose changes are sent."""
        self._loaded: int | None = None
        """The version that the receivers have; None if they may have another one."""
        self._version = 0
        self._sent: dict[tuple[Receivers, int], Bucket] = {}
        """(receivers, number in their stream) -> the bucket of the last version."""
        self._numbers: Counter[Receivers] = Counter()

    def start(self, version: int) -> int | None:
        """Begin a version; returns the one whose changes will be sent, None if whole buckets will be.

        Until `loaded` is called, the receivers may not have the version, so the next one will be sent whole.
        """
        self._base, self._loaded, self._version = self._loaded, None, version
        self._numbers.clear()
        return self._base

    def encode(self, receivers: Receivers, bucket: Bucket) -> Bucket:
        """Return the bucket to send for the next bucket of a stream: its changes, or itself."""
        number = self._numbers[receivers]
        self._numbers[receivers] += 1
        last, self._sent[receivers, number] = self._sent.get((receivers, number)), bucket
        stream = f"{self._owner} to {receivers}"
        label = BucketVersion(stream, number, self._version, bucket.payload.numel())
        if self._base is not None and last is not None and last.slices == bucket.slices:
            width = min(4, *(getattr(torch, entry.dtype).itemsize for entry in bucket.entries))
            words = bucket.payload.view(_WORDS[width])
            places = _places_of_changes(words, last.payload.view(_WORDS[width]))
            if places.numel() * (_PLACE_BYTES + width) < bucket.num_bytes:
                parts = (places.to(torch.int32).view(torch.uint8), words[places].view(torch.uint8))
                label = label._replace(base=self._base, num_changed=places.numel(), word_bytes=width)
                return replace(bucket, payload=torch.cat(parts), version=label)
        return replace(bucket, version=label)

    def loaded(self) -> None:
        """Note that all receivers have loaded the last version."""
        self._loaded = self._version


def _places_of_changes(new: Tensor, old: Tensor) -> Tensor:
    """Return the indices at which two vectors differ. On a CPU numpy needs a third of the time of torch."""
    if new.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(new.numpy() != old.numpy()))  # host: see above
    return torch.nonzero(new != old).squeeze(1)  # waits: once per bucket, whose size depends on it


@cache
def delta_receiver(channel: ChannelSettings) -> DeltaReceiver:
    """Return the receiver of a channel in this process, which is kept for later versions."""
    return DeltaReceiver()


class DeltaReceiver:
    """Turns changes into whole buckets, in the process that receives them."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, int], tuple[int, Tensor]] = {}
        """(stream, number) -> version and payload of the bucket that was received last."""

    def decode(self, bucket: Bucket) -> Bucket:
        """Return the whole bucket, and keep it for the next version.

        Raises:
            RunError: when it was made for another version than the one that was received last.
        """
        label = bucket.version
        assert label is not None, "the sender sends no versions"
        if label.base is None:
            payload = bucket.payload.clone()
        else:
            version, payload = self._buckets.get((label.stream, label.number), (None, bucket.payload))
            if version != label.base:
                raise RunError(
                    f"changes since version {label.base} arrived, but the engine has version {version}. "
                    "Resume from the last checkpoint; if it happens again, set models.NAME.gen.delta=false"
                )
            split = label.num_changed * _PLACE_BYTES
            places = bucket.payload[:split].view(torch.int32).to(torch.int64)
            word = _WORDS[label.word_bytes]
            payload.view(word)[places] = bucket.payload[split:].clone().view(word)
        self._buckets[label.stream, label.number] = label.version, payload
        return replace(bucket, payload=payload, version=None)
