"""Buckets in anonymous shared memory of one machine (`memfd`).

The memory has no name: a receiver opens it through the sender's entry in `/proc`. It exists as long as a
process holds it, so nothing remains, however processes end.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hflow.base.devices import is_gpu
from hflow.base.errors import WorkerFailureError
from hflow.models.device import initialized_accelerator
from hflow.models.host_copy import PinnableMemory
from hflow.planner.weights.weight_slices import Receivers
from hflow.weights.buckets import Bucket, BucketHeader
from hflow.weights.channels.interface import ChannelSettings, WeightChannel


class SharedBucket(NamedTuple):
    """A bucket in a segment of its sender."""

    process: int
    file: int
    """Descriptor of the segment in that process."""
    inode: int
    """Identifies the segment, as descriptors are reused."""
    num_bytes: int
    """The bytes of the payload, which is at the start of the segment."""
    header: BucketHeader


class SharedChannel(WeightChannel):
    """Copies each bucket into a segment of shared memory, which receivers map.

    Segments are reused for later versions, because new memory costs more time than the copy into it.
    """

    def __init__(self, settings: ChannelSettings) -> None:
        super().__init__(settings)
        self._free: list[_Segment] = []
        self._used: dict[int, _Segment] = {}
        """Inode -> segment with a bucket."""
        self._mapped: dict[tuple[int, int], PinnableMemory] = {}
        """(process, inode) -> a segment that this process has mapped as a receiver."""

    @override
    def send(self, receivers: Receivers, bucket: Bucket) -> Any:
        """Copy the bucket into a segment."""
        num_bytes = bucket.payload.numel()
        segment = self._segment(num_bytes)
        if is_gpu(bucket.payload.device.type):
            segment.memory.pin()
        segment.memory.bytes[:num_bytes].copy_(bucket.payload)
        self._used[segment.inode] = segment
        return SharedBucket(os.getpid(), segment.file, segment.inode, num_bytes, bucket.header)

    @override
    def receive(self, handle: Any, receiver: int) -> Bucket:
        """Map the segment."""
        assert isinstance(handle, SharedBucket)
        key = handle.process, handle.inode
        if key not in self._mapped:
            self._mapped[key] = PinnableMemory(_map(handle))
        if initialized_accelerator() is not None:  # this process copies the bucket to its GPU
            self._mapped[key].pin()
        return handle.header.with_payload(self._mapped[key].bytes[: handle.num_bytes])

    @override
    def free(self, handles: Iterable[Any]) -> None:
        """Keep the segments for later buckets."""
        self._free += [self._used.pop(handle.inode) for handle in handles]

    @override
    def close(self) -> None:
        """Free all segments. What receivers have mapped remains until they unmap it."""
        for segment in (*self._free, *self._used.values()):
            segment.close()
        for mapped in self._mapped.values():
            mapped.unpin()
        self._free.clear()
        self._used.clear()
        self._mapped.clear()

    def _segment(self, num_bytes: int) -> _Segment:
        """Return the smallest free segment that is large enough, or a new one."""
        fitting = [segment for segment in self._free if num_bytes <= segment.size <= 2 * num_bytes]
        if not fitting:
            return _Segment(num_bytes)
        segment = min(fitting, key=lambda segment: segment.size)
        self._free.remove(segment)
        return segment


class _Segment:
    """Shared memory that this process has made.

    Attributes:
        file: the segment's file descriptor.
        inode: identifies it on this machine.
        memory: the segment's content.
    """

    def __init__(self, num_bytes: int) -> None:
        self.file = os.memfd_create("hflow-weights", os.MFD_CLOEXEC)
        os.ftruncate(self.file, max(num_bytes, 1))
        self.inode = os.fstat(self.file).st_ino
        self.memory = PinnableMemory(torch.frombuffer(mmap.mmap(self.file, 0), dtype=torch.uint8))

    @property
    def size(self) -> int:
        """The segment's bytes."""
        return self.memory.bytes.numel()

    def close(self) -> None:
        """Free the memory when no other process has mapped it."""
        self.memory.unpin()
        os.close(self.file)


def _map(handle: SharedBucket) -> Tensor:
    """Map a segment of another process, or of this one."""
    try:
        file = os.open(f"/proc/{handle.process}/fd/{handle.file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WorkerFailureError(
            f"shared memory of process {handle.process} cannot be opened ({error.strerror}): the process has "
            "ended or is on another machine. Set models.NAME.gen.transport=store"
        ) from error
    try:
        if os.fstat(file).st_ino != handle.inode:
            raise WorkerFailureError(
                f"shared memory of process {handle.process} was freed before it was loaded"
            )
        return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
    finally:
        os.close(file)
