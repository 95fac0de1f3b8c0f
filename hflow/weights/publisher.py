"""Publishes weights of the training replicas of one process, and opens weights for its engines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hflow.base.errors import WorkerFailureError
from hflow.planner.plan.channels import channel_in_one_process, channel_traits
from hflow.planner.plan.routing import tensor_ranks
from hflow.planner.plan.rows import Plan, WeightRoute
from hflow.planner.plan.traits import traits
from hflow.planner.weights.weight_slices import Receivers, relays, streams
from hflow.weights.buckets import Bucket, SliceValues
from hflow.weights.channels import make_channel, open_channel
from hflow.weights.channels.interface import ChannelSettings, NearHandle, WeightChannel
from hflow.weights.delta import DeltaSender, delta_receiver
from hflow.weights.handover import HandedOver, HandoverSender, handover_address
from hflow.weights.incoming import IncomingWeights
from hflow.weights.outgoing import OutgoingWeights, local_slices, outgoing_slices, outgoing_tensors

if TYPE_CHECKING:
    from hflow.training.interface import ModelBackend

BucketHandles = list[tuple[Receivers, list[Any]]]
"""For each set of receivers, the handles of its buckets in order."""


@dataclass(frozen=True)
class PublishReport:
    """What the controller learns about weights that a process published."""

    replica: str
    """That will receive them."""
    version: int
    num_bytes: int
    """Bytes that were sent."""
    near_bytes: int
    """The part of them for the engine on the sender's device, if that takes a way of its own."""
    whole_bytes: int
    """Bytes of all slices, of which only changes may have been sent."""
    base: int | None
    """The version whose changes were sent; None: all slices were sent whole."""
    checksums: Mapping[int, int]
    """Receiver -> checksum of what it was sent."""
    start: float
    """Seconds since the epoch."""
    end: float


class WeightPublisher:
    """Publishes and frees weights for the sender, and opens them for the receiver.

    Args:
        settings: generation replica -> the channel that carries its weights.
    """

    def __init__(self, routes: WorkerRoutes, settings: Mapping[str, ChannelSettings], device: str) -> None:
        self._routes = routes
        self._device = device
        self._settings = settings
        self._channels: dict[str, WeightChannel] = {}
        """Replica -> the sending end of its channel, from the first publication on."""
        self._near: dict[str, WeightChannel] = {}
        """Replica -> the sending end of the channel to its engine on this device, if that is another one."""
        self._handles: dict[str, list[Any]] = {}
        """Replica -> handles of buckets that were sent to it and not freed."""
        self._deltas: dict[str, DeltaSender] = {}
        """Replica -> what finds its changes, if only these are sent."""
        self._num_losses: Counter[str] = Counter()
        """Replica -> how often it had lost an engine when weights were published for it last."""
        self._handed_over: dict[str, int] = {}
        """Replica -> the last version that was handed over to it."""
        self._relays: dict[str, tuple[WeightChannel, list[Any]]] = {}
        """Replica -> channel and handles of what was copied for its engine here from the object store."""

    def publish(self, replica: str, version: int, num_losses: int = 0) -> tuple[BucketHandles, PublishReport]:
        """Put what a generation replica needs of the weights here where its workers can take it.

        Args:
            num_losses: how often the replica has lost an engine. If it has lost one since the last call, new
                processes receive, which have nothing.
        """
        start = time.time()
        if num_losses != self._num_losses[replica]:
            self._renew(replica)
            self._num_losses[replica] = num_losses
        outgoing = self._routes.outgoing(replica)
        if replica not in self._channels:
            settings = self._settings[replica]
            self._channels[replica] = make_channel(settings)
            if settings.near:
                self._near[replica] = make_channel(settings.nearby)
            if self._routes.sends_changes(replica):
                self._deltas[replica] = DeltaSender(self._settings[replica].owner)
        handles = self._handles.setdefault(replica, [])
        delta = self._deltas.get(replica)
        base = None if delta is None else delta.start(version)
        by_receivers: dict[Receivers, list[Any]] = {}
        num_bytes = near_bytes = 0
        with self._routes.source(replica).on_device():
            for sent in _sent(lambda *bucket: self._send(replica, *bucket), outgoing, delta):
                handles.append(sent.handle)
                by_receivers.setdefault(sent.receivers, []).append(sent.handle)
                num_bytes += sent.num_bytes
                near_bytes += sent.num_bytes if isinstance(sent.handle, NearHandle) else 0
        report = PublishReport(
            replica,
            version,
            num_bytes,
            near_bytes,
            outgoing.num_bytes,
            base,
            outgoing.checksums,
            start,
            time.time(),
        )
        return list(by_receivers.items()), report

    def _send(self, replica: str, receivers: Receivers, bucket: Bucket) -> Any:
        """Send a bucket, and return its handle."""
        if replica in self._near and receivers == self._routes.itself:
            return NearHandle(self._near[replica].send(receivers, bucket))
        return self._channels[replica].send(receivers, bucket)

    def incoming(self, replica: str, published: Sequence[BucketHandles]) -> list[IncomingWeights]:
        """Return the weights that a replica's engine here loads, for each tensor rank, of what senders sent.

        Call `loaded` when they are.
        """
        settings = self._settings[replica]
        if channel_traits(settings.name).needs_ray and self._routes.has_own_process(replica):
            settings, published = self._relay(replica, published)
        return [
            IncomingWeights(
                settings,
                receiver,
                self._device,
                [handles for sent in published for receivers, handles in sent if receiver in receivers],
                local,
            )
            for receiver, local in self._routes.incoming(replica)
        ]

    def needs_handover(self, replica: str, version: int) -> bool:
        """Return whether a version is to be handed over to a replica's engine on this device."""
        return self._routes.hands_over(replica) and self._handed_over.get(replica) != version

    def handed_over(self, replica: str) -> list[IncomingWeights]:
        """Return the weights that each rank of a replica's engine takes from the worker on its device."""
        settings = self._settings[replica]
        return [
            IncomingWeights(
                settings,
                receiver,
                self._device,
                [HandedOver(_address(settings, replica, receiver), settings.timeout)],
            )
            for receiver, _ in self._routes.incoming(replica)
        ]

    def hand_over(self, replica: str, version: int, has_failed: Callable[[], bool]) -> int:
        """Gather a version with all ranks of the trainer, and hand it over to the rank on this device.

        Return the checksum of the weights. `has_failed` is called while the rank has not come, and is true if
        it never will.

        Raises:
            WorkerFailureError: if the rank does not take them.
        """
        settings, (worker,) = self._settings[replica], self._routes.itself
        if replica not in self._channels:
            self._channels[replica] = make_channel(settings)
        sender = HandoverSender(
            self._channels[replica], _address(settings, replica, worker), settings.timeout
        )
        backend = self._routes.source(replica)
        outgoing = OutgoingWeights(outgoing_tensors((worker,), backend, is_sender=True))
        with closing(sender), backend.on_device():
            sender.send(worker, (bucket for _, bucket in outgoing), has_failed)
        self._handed_over[replica] = version
        return outgoing.checksums[worker]

    def loaded(self, replica: str) -> None:
        """Free what only the loading of a replica's weights needed."""
        if replica in self._relays:
            channel, handles = self._relays[replica]
            channel.free(handles)
            handles.clear()

    def _relay(
        self, replica: str, published: Sequence[BucketHandles]
    ) -> tuple[ChannelSettings, list[BucketHandles]]:
        """Copy what a replica's engine here receives from the object store into shared memory.

        The ranks of the engine are no Ray processes, so they cannot read the store themselves. What their own
        workers sent does not come through the store.
        """
        store = self._settings[replica]
        settings = replace(store, name=channel_in_one_process(store.name, has_own_process=True))
        if replica not in self._relays:
            self._relays[replica] = make_channel(settings), []
        channel, kept = self._relays[replica]
        workers = {worker for worker, _ in self._routes.incoming(replica)}
        relayed: list[BucketHandles] = []
        for sent in published:
            relayed.append([])
            for receivers, handles in sent:
                if not workers & set(receivers):
                    continue
                if isinstance(handles[0], NearHandle):
                    relayed[-1].append((receivers, handles))
                    continue
                buckets = (open_channel(store).receive(handle, min(workers)) for handle in handles)
                copies = [channel.send(receivers, bucket) for bucket in buckets]
                kept += copies
                relayed[-1].append((receivers, copies))
        return settings, relayed

    def _renew(self, replica: str) -> None:
        """Drop what was sent to a replica, and what is known of its engines, as one of them was replaced."""
        with suppress(WorkerFailureError):  # a broadcast that this engine has not taken
            self._free(replica)
        self._deltas.pop(replica, None)
        if replica in self._channels:
            self._channels[replica].forget_receivers()
            if self._routes.sends_changes(replica):
                self._deltas[replica] = DeltaSender(self._settings[replica].owner)

    def free(self, replica: str, num_losses: int = 0) -> None:
        """Free what was sent to a replica; its engines have loaded it, or never will.

        Nothing is done if the replica has lost more engines since: `publish` has freed that already.
        """
        if num_losses == self._num_losses[replica]:
            self._free(replica)

    def _free(self, replica: str) -> None:
        handles = self._handles.pop(replica, ())
        if handles:
            self._channels[replica].free([one for one in handles if not isinstance(one, NearHandle)])
        if replica in self._near:
            self._near[replica].free([one.handle for one in handles if isinstance(one, NearHandle)])
        if replica in self._deltas:
            self._deltas[replica].loaded()

    def close(self) -> None:
        """Free everything that was sent, and close all channels of this process. Safe to call twice."""
        for replica in tuple(self._handles):
            self._free(replica)
        relays = (relay for relay, _ in self._relays.values())
        for channel in (*self._channels.values(), *self._near.values(), *relays):
            channel.close()
        self._channels.clear()
        self._near.clear()
        self._relays.clear()
        open_channel.cache_clear()
        delta_receiver.cache_clear()


class _SentBucket(NamedTuple):
    receivers: Receivers
    handle: Any
    num_bytes: int


def _sent(
    send_bucket: Callable[[Receivers, Bucket], Any], outgoing: OutgoingWeights, delta: DeltaSender | None
) -> Iterator[_SentBucket]:
    """Send weights, or their changes; yields each bucket that was sent, in order.

    While a bucket is sent on a thread, the next one is packed here, which may need collectives.
    """

    def send(receivers: Receivers, bucket: Bucket) -> _SentBucket:
        encoded = bucket if delta is None else delta.encode(receivers, bucket)
        return _SentBucket(receivers, send_bucket(receivers, encoded), encoded.num_bytes)

    pending: Future[_SentBucket] | None = None
    with ThreadPoolExecutor(1, "hflow-weights") as thread:
        for receivers, bucket in outgoing:
            if pending is not None:
                yield pending.result()
            pending = thread.submit(send, receivers, bucket)
        if pending is not None:
            yield pending.result()


class WorkerRoutes:
    """The weight routes of one worker process.

    Args:
        hosted: indices of the workers that this process hosts.
        backends: replica -> its shard here.
    """

    def __init__(self, plan: Plan, hosted: Sequence[int], backends: Mapping[str, ModelBackend]) -> None:
        self._plan = plan
        self._worker = hosted[0]
        self._hosts_all = len(hosted) == plan.cluster.num_devices
        self._backends = backends

    @property
    def itself(self) -> Receivers:
        """Return this worker as the only receiver of a bucket."""
        return (self._worker,)

    def outgoing(self, replica: str) -> OutgoingWeights:
        """Return the slices that this process sends to a generation replica that pulls weights.

        A route with rows says what each worker sends, without a collective. By a route without rows, the
        worker of the source's rank 0 sends everything, and the others take part in gathering it. A process
        that hosts all workers sends to itself.
        """
        route = self._route(replica)
        backend = self.source(replica)
        if self._hosts_all:
            return OutgoingWeights(outgoing_tensors((self._worker,), backend, True))
        if route.rows:
            to_itself = self.has_own_process(replica)
            slices = outgoing_slices(route, self._plan.cluster, self._worker, backend, to_itself)
            return OutgoingWeights(slices)
        is_sender = self._plan.replica(route.src).workers[0] == self._worker
        return OutgoingWeights(outgoing_tensors(self._plan.replica(replica).workers, backend, is_sender))

    def source(self, replica: str) -> ModelBackend:
        """Return the shard of the training replica here that sends a generation replica its weights."""
        return self._backends[self._route(replica).src]

    def incoming(self, replica: str) -> list[tuple[int, Callable[[], Iterator[SliceValues]] | None]]:
        """Return the tensor ranks of a replica's engine here, as workers, and what each holds already."""
        route, engine = self._route(replica), self._plan.replica(replica)
        if self._hosts_all:
            return [(self._worker, None)] * engine.layout.tensor
        workers = tensor_ranks(engine, self._worker)
        backend = self._backends.get(route.src)
        if backend is None or self.has_own_process(replica):
            return [(worker, None) for worker in workers]
        assert workers == (self._worker,), "only an engine of one rank keeps what its worker holds"
        return [(self._worker, lambda: local_slices(route, self._worker, backend))]

    def sends_changes(self, replica: str) -> bool:
        """Return whether only changes are sent to a generation replica."""
        return self._route(replica).delta

    def has_own_process(self, replica: str) -> bool:
        """Return whether the engines of a generation replica run in processes of their own."""
        return _has_own_process(self._plan, replica)

    def hands_over(self, replica: str) -> bool:
        """Return whether workers hand whole tensors over to the processes of a replica's engines."""
        return any(route.dst == replica and route.hands_over for route in self._plan.weights)

    def _route(self, replica: str) -> WeightRoute:
        return next(route for route in self._plan.weights if route.dst == replica)


def channel_settings(
    plan: Plan, hosted: Sequence[int], directory: str, host: str, timeout: float
) -> dict[str, ChannelSettings]:
    """Return the channel of each generation replica that receives weights from other processes.

    Args:
        hosted: indices of the workers that the process hosts. One that hosts all of them has no object store:
            it keeps buckets in its memory, or in shared memory for an engine in a process of its own.
        host: address of this machine, as the other workers know it.
        timeout: seconds after which a transfer that needs several processes at once fails.
    """
    hosts_all = len(hosted) == plan.cluster.num_devices
    settings = {}
    for route in plan.weights:
        owner = f"{route.dst}-{hosted[0]}"
        if route.hands_over:
            settings[route.dst] = ChannelSettings(route.near, owner, directory, host, timeout)
        if route.how == "pull":
            name = route.transport
            sent = streams(route, plan.cluster) if channel_traits(name).broadcasts else ()
            passed = relays(sent, plan.cluster).items()
            if hosts_all:
                own_process = _has_own_process(plan, route.dst)
                name = channel_in_one_process(name, has_own_process=own_process)
            near = "" if hosts_all else route.near
            mine = tuple((to, relay) for (sender, to), relay in passed if sender in hosted)
            settings[route.dst] = ChannelSettings(name, owner, directory, host, timeout, near, mine)
    return settings


def _address(settings: ChannelSettings, replica: str, worker: int) -> str:
    """Return the address at which a worker hands a replica's weights over."""
    return handover_address(f"{replica}-{worker}", settings.directory)


def _has_own_process(plan: Plan, replica: str) -> bool:
    """Return whether the engines of a generation replica run in processes of their own."""
    return traits(plan.replica(replica).backend).has_own_process
