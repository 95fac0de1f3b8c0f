"""Buckets in Ray's object store: shared memory on one machine, fetched once by each other one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray

from hflow.weights.buckets import Bucket
from hflow.weights.channels.interface import WeightChannel


class StoreChannel(WeightChannel):
    """A handle is a reference; the bucket lives as long as any process holds it."""

    def send(self, bucket: Bucket) -> Any:
        """Copy the bucket into the store."""
        return ray.put(bucket)

    def receive(self, handle: Any) -> Bucket:
        """Map the bucket, without a copy if it is on this machine."""
        bucket: Bucket = ray.get(handle)
        return bucket

    def free(self, handles: Iterable[Any]) -> None:
        """Do nothing: a bucket lives as long as its handle."""


Channel = StoreChannel
