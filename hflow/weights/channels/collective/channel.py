"""Buckets as broadcasts of torch.distributed, from device to device: NCCL on CUDA, gloo on a CPU.

A *stream* is all that one sender sends to one set of receivers. The sender keeps the packed buckets and
broadcasts them on a thread when the receivers come, so training continues meanwhile.

On GPUs each process group takes hundreds of MiB of every member. Receivers of several senders therefore have
one group among them: each sender sends to one of them, its *relay*, in a group of two, and the relay
broadcasts to the others. Senders are in no group with each other, since a broadcast that waits for another
trainer could wait for one that waits in a collective of training. A receiver of N senders joins about N / R
+ 1 groups in place of N, where R is the number of receivers. Groups stay open for later versions.

**Why it cannot deadlock.** A broadcast needs all members of its group at the same time. A sender has a thread
per stream, and enters a broadcast only when the relay, or all receivers if there is none, have said that they
wait for exactly this bucket. So a sender never holds up another stream, and never waits in a collective for
an engine that is busy.

A receiver takes one bucket at a time. It takes bucket j of stream s when it has used the last slice of bucket
j - 1. `assemble_tensors` merges streams by (position of the tensor, place of the stream), so a receiver takes
buckets in the order of (position of that last slice, place of the stream). The position belongs to the
stream, and the places of common streams have the same order at all receivers. So all receivers take the
buckets that they share in one order, which is that of the broadcasts among them. The receivers that wait for
the first of all buckets can always proceed.

A relay takes the next bucket of a stream from its sender while it broadcasts one (`expect`). It waits for
that only when it takes the bucket, and the group of two has no other members, so the order stays the same.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from typing_extensions import override

from hflow.base.devices import is_gpu
from hflow.base.errors import WorkerFailureError
from hflow.planner.weights.weight_slices import Receivers
from hflow.weights.buckets import Bucket, BucketHeader
from hflow.weights.channels.interface import ChannelSettings, WeightChannel
from hflow.weights.rendezvous import connect_store, listen_where, open_store

_SHORTEST_WAIT, _LONGEST_WAIT = 0.0005, 0.05
"""Seconds between two looks at whether the receivers wait for a bucket, at first and at last."""
_CLOSE_SECONDS = 1.0
"""How long a closed channel waits for a broadcast that is under way, which is aborted after half of it."""


class CollectiveBucket(NamedTuple):
    """A bucket that its sender broadcasts when all receivers wait for it."""

    address: str
    """`host:port` of the sender's store, where the stream's members meet."""
    receivers: Receivers
    """The workers that take it, in the order of their ranks."""
    relay: int | None
    """The receiver that takes it from the sender and broadcasts it; None: the sender broadcasts to all."""
    generation: int
    """Counts the times that receivers were replaced. All senders have the same count."""
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

    @property
    def first_receivers(self) -> Receivers:
        """The receivers that are in a group with the sender."""
        return self.receivers if self.relay is None else (self.relay,)


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
        """(address, receivers) -> the receiver's group with the sender of a stream."""
        self._groups_of_receivers: dict[Receivers, Any] = {}
        """Receivers -> their group, where one passes buckets on to the others."""
        self._expected: dict[tuple[str, str], tuple[Tensor, Any]] = {}
        """(address, key) of a bucket that is on its way from the sender -> the payload, and the broadcast."""
        self._generation = 0
        """The generation of receivers, at either end."""

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
            relay = dict(self._settings.relays).get(receivers)
            self._streams[receivers] = _Stream(address, receivers, relay, self._generation, self._timeout)
        return self._streams[receivers].add(bucket)

    @override
    def expect(self, handle: Any, receiver: int) -> None:
        """Begin to take the bucket from its sender, if the receiver is its relay."""
        assert isinstance(handle, CollectiveBucket)
        if handle.relay == receiver:
            try:
                self._follow(handle)
                self._begin(handle, receiver)
            except (RuntimeError, dist.DistError) as error:
                raise _failure(f"worker {receiver} could not receive weights", error) from error

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
        self._generation += 1

    @override
    def close(self) -> None:
        """Drop buckets that were not taken. Threads in calls of torch would abort a process that ends."""
        for stream in self._streams.values():
            stream.close()
        for stream in self._streams.values():
            stream.thread.join(_CLOSE_SECONDS)
        self._streams.clear()
        self._server = None
        self._stores.clear()
        self._leave_groups()

    def _leave_groups(self) -> None:
        self._expected.clear()
        self._groups.clear()
        self._groups_of_receivers.clear()

    def _follow(self, handle: CollectiveBucket) -> TCPStore:
        """Return the store of a bucket's sender; leaves the groups of receivers that were replaced."""
        if handle.generation != self._generation:
            self._leave_groups()
            self._generation = handle.generation
        if handle.address not in self._stores:
            self._stores[handle.address] = connect_store(handle.address, self._timeout)
        return self._stores[handle.address]

    def _broadcast(self, handle: CollectiveBucket, receiver: int) -> Tensor:
        store = self._follow(handle)
        if receiver in handle.first_receivers:
            self._begin(handle, receiver)
            payload, arriving = self._expected.pop((handle.address, handle.key))
            arriving.wait()
        else:
            payload = _new_payload(handle)
        if handle.relay is not None:
            if handle.receivers not in self._groups_of_receivers:
                # All receivers take this bucket first of those that they share, so they meet in one store.
                name, rank = f"among {_stream_name(handle.receivers)}", handle.receivers.index(receiver)
                self._groups_of_receivers[handle.receivers] = _join(
                    store, name, rank, len(handle.receivers), handle.device, self._timeout
                )
            root = handle.receivers.index(handle.relay)
            _begin_broadcast(self._groups_of_receivers[handle.receivers], payload, root).wait()
        return payload

    def _begin(self, handle: CollectiveBucket, receiver: int) -> None:
        """Begin to take a bucket from its sender, unless that was begun before."""
        if (handle.address, handle.key) in self._expected:
            return
        store, members = self._stores[handle.address], handle.first_receivers
        if store.add(f"{handle.key}/ready", 1) == len(members):
            store.set(f"{handle.key}/all", "")
        key = handle.address, handle.receivers
        if key not in self._groups:
            rank = 1 + members.index(receiver)
            name, size = _stream_name(handle.receivers), 1 + len(members)
            self._groups[key] = _join(store, name, rank, size, handle.device, self._timeout)
        payload = _new_payload(handle)
        arriving = _begin_broadcast(self._groups[key], payload)
        self._expected[handle.address, handle.key] = payload, arriving


class _Stream:
    """The sending end of a stream: a queue of buckets, and the thread that broadcasts them.

    Attributes:
        thread: the thread.
    """

    def __init__(
        self,
        address: str,
        receivers: Receivers,
        relay: int | None,
        generation: int,
        timeout: datetime.timedelta,
    ) -> None:
        self._address = address
        self._receivers = receivers
        self._relay = relay
        self._generation = generation
        self._timeout = timeout
        self._number = 0
        self._queue: SimpleQueue[tuple[CollectiveBucket, Tensor, torch.Event | None] | None] = SimpleQueue()
        """Buckets; None wakes the thread when the channel is closed."""
        self._closed = threading.Event()
        self._error: Exception | None = None
        self.thread = threading.Thread(target=self._main, name="hflow-broadcast", daemon=True)
        self.thread.start()

    def add(self, bucket: Bucket) -> CollectiveBucket:
        self.raise_if_failed()
        payload, device = bucket.payload, bucket.payload.device.type
        handle = CollectiveBucket(
            self._address,
            self._receivers,
            self._relay,
            self._generation,
            self._number,
            payload.numel(),
            device,
            bucket.header,
        )
        self._number += 1
        packed = torch.get_device_module(device).Event() if is_gpu(device) else None
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
        self._queue.put(None)

    def _main(self) -> None:
        try:
            self._run()
        except (RuntimeError, dist.DistError) as error:
            self._error = error.with_traceback(None)  # its frames hold the group, for which receivers wait

    def _run(self) -> None:
        store, group = connect_store(self._address, self._timeout), None
        stream: Any = None
        while (bucket := self._queue.get()) is not None and not self._closed.is_set():
            handle, payload, packed = bucket
            if not self._all_wait(store, handle):
                return
            if group is None:
                name, size = _stream_name(self._receivers), 1 + len(handle.first_receivers)
                group = _join(store, name, 0, size, handle.device, self._timeout)
            if packed is None:
                _begin_broadcast(group, payload).wait()
                continue
            accelerator = torch.get_device_module(payload.device)
            if stream is None:
                stream = accelerator.Stream(payload.device)
            with accelerator.stream(stream):
                packed.wait(stream)
                _begin_broadcast(group, payload).wait()
                sent = stream.record_event()
            if not self._is_sent(sent):
                group.abort()
                return

    def _is_sent(self, sent: torch.Event) -> bool:
        """Wait until a bucket is sent; returns False if the channel was closed and its receivers are gone.

        NCCL would wait for them until torch ends this process, which trains.
        """
        closed = None
        while not sent.query():
            if closed is None and self._closed.is_set():
                closed = time.monotonic()
            if closed is not None and time.monotonic() > closed + _CLOSE_SECONDS / 2:
                return False
            time.sleep(_SHORTEST_WAIT)
        return True

    def _all_wait(self, store: TCPStore, handle: CollectiveBucket) -> bool:
        """Wait until all first receivers wait for a bucket; returns False if the channel was closed."""
        seconds = _SHORTEST_WAIT
        while not store.check([f"{handle.key}/all"]):
            if self._closed.wait(seconds):
                return False
            seconds = min(2 * seconds, _LONGEST_WAIT)
        return True


def _stream_name(receivers: Receivers) -> str:
    return "to " + " ".join(map(str, receivers))


def _join(store: TCPStore, name: str, rank: int, size: int, device: str, timeout: datetime.timedelta) -> Any:
    """Join a group that meets in a store under a name; returns when all its members have joined.

    The group is made without `init_process_group`, as an engine's process has a default group of its own.
    """
    prefixed = PrefixStore(name, store)
    if device == "cpu":
        return dist.ProcessGroupGloo(prefixed, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(prefixed, rank, size, options)


def _new_payload(handle: CollectiveBucket) -> Tensor:
    return torch.empty(handle.num_bytes, dtype=torch.uint8, device=handle.device)


def _begin_broadcast(group: Any, payload: Tensor, root: int = 0) -> Any:
    """Begin a broadcast from a rank. `wait` of the result waits, on CUDA only with the current stream."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return group.broadcast([payload], options)


def _failure(what: str, error: Exception) -> WorkerFailureError:
    reason = str(error).strip().splitlines()[0]
    return WorkerFailureError(
        f"{what}: {reason}. A process has ended, or collective_timeout is too short for one bucket"
    )
