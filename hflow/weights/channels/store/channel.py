"""Buckets in Ray's object store: shared memory on one machine, fetched once by each other one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import ray
import torch
from typing_extensions import override

from hflow.models.host_copy import host_payload
from hflow.planner.weights.weight_slices import Receivers
from hflow.weights.buckets import Bucket, BucketHeader
from hflow.weights.channels.interface import WeightChannel

# What Ray returns is read-only; weights that were received are only read.
warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)


class StoreChannel(WeightChannel):
    """A handle is a reference; the bucket lives as long as any process holds it."""

    @override
    def send(self, receivers: Receivers, bucket: Bucket) -> Any:
        """Copy the bucket into the store."""
        return ray.put((bucket.header, host_payload(bucket.payload).numpy()))

    @override
    def receive(self, handle: Any, receiver: int) -> Bucket:
        """Map the bucket, without a copy if it is on this machine."""
        header: BucketHeader
        payload: np.ndarray[Any, np.dtype[np.uint8]]
        header, payload = ray.get(handle)
        return header.with_payload(torch.from_numpy(payload))

    @override
    def free(self, handles: Iterable[Any]) -> None:
        """Do nothing: a bucket lives as long as its handle."""
