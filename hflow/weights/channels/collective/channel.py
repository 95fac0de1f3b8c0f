"""Buckets as broadcasts of torch.distributed, from device to device: NCCL on CUDA, gloo on a CPU.

A *stream* is all that one sender sends to one set of receivers. It has a process group of its own, with the
sender as rank 0, which stays open for later versions. The sender keeps the packed buckets and broadcasts them
on a thread when the receivers come, so training continues meanwhile.

**Why it cannot deadlock.** A broadcast needs all members of its group at the same time. A sender has a thread
per stream, and enters a broadcast only when all receivers have said that they wait for exactly this bucket.
So a sender never holds up another stream, and never waits in a collective for an engine that is busy.

A receiver takes one bucket at a time. It takes bucket j of stream s when it has used the last slice of bucket
j - 1. `assemble_tensors` merges streams by (position of the tensor, place of the stream), so a receiver takes
buckets in the order of (position of that last slice, place of the stream). The position belongs to the
stream, and the places of common streams have the same order at all receivers. So all receivers take the
buckets that they share in one order, and the receiver that waits for the first of them can always proceed.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from typing_extensions import override

from hflow.base.errors import WorkerFailureError
from hflow.planner.weights.weight_slices import Receivers
from hflow.weights.buckets import Bucket, BucketHeader
from hflow.weights.channels.interface import ChannelSettings, WeightChannel
from hflow.weights.rendezvous import connect_store, listen_where, open_store

_SHORTEST_WAIT, _LONGEST_WAIT = 0.0005, 0.05
"""Seconds between two looks at whether the receivers wait for a bucket, at first and at last."""
_QUEUE_SECONDS = 0.5
"""How often a sender without buckets looks whether the channel was closed."""


class CollectiveBucket(NamedTuple):
    """A bucket that its sender broadcasts when all receivers wait for it."""

    address: str
    """`host:port` of the sender's store, where the stream's members meet."""
    receivers: Receivers
    """Rank - 1 -> worker, in the stream's group."""
    number: int
    """Counts the buckets of the stream."""
    num_bytes: int
    device: str
    """`cpu` or `cuda`."""
    header: BucketHeader

    @property
    def key(self) -> str:
        """Prefix of this bucket's keys in the store."""
        return f"{_stream_name(self.receivers)}/{self.number}"


class CollectiveChannel(WeightChannel):
    """Broadcasts buckets to their receivers."""

    def __init__(self, settings: ChannelSettings) -> None:
        super().__init__(settings)
        listen_where(settings.host)
        self._timeout = datetime.timedelta(seconds=settings.timeout)
        self._server: TCPStore | None = None
        """The sender's store; opened with the first bucket."""
        self._streams: dict[Receivers, _Stream] = {}
        self._stores: dict[str, TCPStore] = {}
        """Address -> connection of the receiver."""
        self._groups: dict[tuple[str, Receivers], Any] = {}
        """(address, receivers) -> the receiver's group of a stream."""

    @override
    def send(self, receivers: Receivers, bucket: Bucket) -> Any:
        """Keep the bucket until its receivers take it.

        Raises:
            WorkerFailureError: when an earlier broadcast has failed.
        """
        if self._server is None:
            self._server = open_store(self._settings.host, self._timeout)
        if receivers not in self._streams:
            address = f"{self._settings.host}:{self._server.port}"
            self._streams[receivers] = _Stream(address, receivers, self._timeout)
        return self._streams[receivers].add(bucket)

    @override
    def receive(self, handle: Any, receiver: int) -> Bucket:
        """Take part in the bucket's broadcast."""
        assert isinstance(handle, CollectiveBucket)
        try:
            return handle.header.with_payload(self._broadcast(handle, receiver))
        except (RuntimeError, dist.DistError) as error:
            raise _failure(f"worker {receiver} could not receive weights", error) from error

    @override
    def free(self, handles: Iterable[Any]) -> None:
        """Do nothing: a bucket is dropped when it was broadcast.

        Raises:
            WorkerFailureError: when a broadcast has failed.
        """
        for stream in self._streams.values():
            stream.raise_if_failed()

    @override
    def forget_receivers(self) -> None:
        """Drop buckets that were not taken. The next ones have another address, where new groups form.

        Receivers that still wait for a member that has ended fail, as this ends the old address.
        """
        self.close()

    @override
    def close(self) -> None:
        """Drop buckets that were not taken."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._server = None
        self._stores.clear()
        self._groups.clear()

    def _broadcast(self, handle: CollectiveBucket, receiver: int) -> Tensor:
        if handle.address not in self._stores:
            self._stores[handle.address] = connect_store(handle.address, self._timeout)
        store = self._stores[handle.address]
        if store.add(f"{handle.key}/ready", 1) == len(handle.receivers):
            store.set(f"{handle.key}/all", "")
        key = handle.address, handle.receivers
        if key not in self._groups:
            rank = 1 + handle.receivers.index(receiver)
            self._groups[key] = _join(store, handle.receivers, rank, handle.device, self._timeout)
        payload = torch.empty(handle.num_bytes, dtype=torch.uint8, device=handle.device)
        _run_broadcast(self._groups[key], payload)
        return payload


class _Stream:
    """The sending end of a stream: a queue of buckets, and the thread that broadcasts them."""

    def __init__(self, address: str, receivers: Receivers, timeout: datetime.timedelta) -> None:
        self._address = address
        self._receivers = receivers
        self._timeout = timeout
        self._number = 0
        self._queue: SimpleQueue[tuple[CollectiveBucket, Tensor, torch.cuda.Event | None]] = SimpleQueue()
        self._closed = threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._main, name="hflow-broadcast", daemon=True).start()

    def add(self, bucket: Bucket) -> CollectiveBucket:
        self.raise_if_failed()
        payload, device = bucket.payload, bucket.payload.device.type
        handle = CollectiveBucket(
            self._address, self._receivers, self._number, payload.numel(), device, bucket.header
        )
        self._number += 1
        packed = torch.cuda.Event() if device == "cuda" else None
        if packed is not None:
            packed.record()
        self._queue.put((handle, payload, packed))
        return handle

    def raise_if_failed(self) -> None:
        if self._error is not None:
            workers = ", ".join(map(str, self._receivers))
            raise _failure(f"weights could not be broadcast to worker {workers}", self._error)

    def close(self) -> None:
        self._closed.set()

    def _main(self) -> None:
        try:
            self._run()
        except (RuntimeError, dist.DistError) as error:
            self._error = error.with_traceback(None)  # its frames hold the group, for which receivers wait

    def _run(self) -> None:
        store, group = connect_store(self._address, self._timeout), None
        stream: torch.cuda.Stream | None = None
        while not self._closed.is_set():
            try:
                handle, payload, packed = self._queue.get(timeout=_QUEUE_SECONDS)
            except Empty:
                continue
            if not self._all_wait(store, handle):
                return
            if group is None:
                group = _join(store, self._receivers, 0, handle.device, self._timeout)
            if packed is None:
                _run_broadcast(group, payload)
                continue
            if stream is None:
                stream = torch.cuda.Stream(payload.device)
            with torch.cuda.stream(stream):
                packed.wait(stream)
                _run_broadcast(group, payload)
                stream.synchronize()

    def _all_wait(self, store: TCPStore, handle: CollectiveBucket) -> bool:
        """Wait until all receivers wait for a bucket; returns False if the channel was closed."""
        seconds = _SHORTEST_WAIT
        while not store.check([f"{handle.key}/all"]):
            if self._closed.wait(seconds):
                return False
            seconds = min(2 * seconds, _LONGEST_WAIT)
        return True


def _stream_name(receivers: Receivers) -> str:
    return "to " + " ".join(map(str, receivers))


def _join(store: TCPStore, receivers: Receivers, rank: int, device: str, timeout: datetime.timedelta) -> Any:
    """Join the group of a stream; returns when all its members have joined.

    The group is made without `init_process_group`, as an engine's process has a default group of its own.
    """
    prefixed, size = PrefixStore(_stream_name(receivers), store), 1 + len(receivers)
    if device == "cpu":
        return dist.ProcessGroupGloo(prefixed, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(prefixed, rank, size, options)


def _run_broadcast(group: Any, payload: Tensor) -> None:
    """Broadcast from rank 0; returns when it is done, or on CUDA when the current stream waits for it."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([payload], options).wait()


def _failure(what: str, error: Exception) -> WorkerFailureError:
    reason = str(error).strip().splitlines()[0]
    return WorkerFailureError(
        f"{what}: {reason}. A process has ended, or collective_timeout is too short for one bucket"
    )
