"""Buckets that stay in the process that made them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from hflow.planner.weights.weight_slices import Receivers
from hflow.weights.buckets import Bucket
from hflow.weights.channels.interface import WeightChannel


class MemoryChannel(WeightChannel):
    """A handle is the bucket itself."""

    @override
    def send(self, receivers: Receivers, bucket: Bucket) -> Any:
        """Return the bucket itself."""
        return bucket

    @override
    def receive(self, handle: Any, receiver: int) -> Bucket:
        """Return the same bucket."""
        assert isinstance(handle, Bucket)
        return handle

    @override
    def free(self, handles: Iterable[Any]) -> None:
        """Do nothing: a bucket lives as long as its handle."""
