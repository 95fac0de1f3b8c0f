"""Publishes weights of the training replicas of one process, and opens weights for its engines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.backends.interface import ModelBackend
from hflow.planner.ir import Plan, WeightRoute
from hflow.planner.weights.weight_slices import Receivers
from hflow.workers.interface import Span
from hflow.workers.weights.buckets import Bucket
from hflow.workers.weights.transports.disk import DiskTransport
from hflow.workers.weights.transports.interface import Transport
from hflow.workers.weights.weight_stream import (
    IncomingWeights,
    OutgoingWeights,
    local_slices,
    outgoing_slices,
    outgoing_tensors,
)

BucketHandles = list[tuple[Receivers, list[Any]]]
"""For each set of receivers, the handles of its buckets in order."""


@dataclass(frozen=True)
class PublishReport:
    """What the controller learns about weights that a process published."""

    checksums: Mapping[int, int]
    """Receiver -> checksum of what it was sent."""
    span: Span


class WeightPublisher:
    """Publishes and frees weights for the sender, and opens them for the receiver.

    Args:
        routes: what this process sends and receives.
        worker: the index of this process's first worker.
        transports: generation replica -> transport of its weights.
    """

    def __init__(self, routes: WorkerRoutes, worker: int, transports: Mapping[str, Transport]) -> None:
        self._routes = routes
        self._worker = worker
        self._transports = transports
        self._handles: dict[str, list[Any]] = {}
        """Replica -> handles of buckets that were put for it and not freed."""

    def publish(self, replica: str, version: int) -> tuple[BucketHandles, PublishReport]:
        """Put what a generation replica needs of the weights here where its workers can take it."""
        start = time.time()
        transport, outgoing = self._transports[replica], self._routes.outgoing(replica)
        by_receivers: dict[Receivers, list[Any]] = {}
        handles = self._handles.setdefault(replica, [])
        num_bytes = 0
        for receivers, bucket in outgoing:
            handles.append(transport.put(bucket))
            by_receivers.setdefault(receivers, []).append(handles[-1])
            num_bytes += bucket.num_bytes
        details = {"version": version, "bytes": num_bytes}
        span = Span(f"publish {replica}", "weights", start, time.time(), details)
        return list(by_receivers.items()), PublishReport(outgoing.checksums, span)

    def incoming(self, replica: str, published: Sequence[BucketHandles]) -> IncomingWeights:
        """Return the weights that a replica's engine here loads.

        Args:
            replica: the generation replica.
            published: what each sender put.
        """
        transport = self._transports[replica]
        streams = [
            _buckets(transport, handles)
            for of_sender in published
            for receivers, handles in of_sender
            if self._worker in receivers
        ]
        return self._routes.incoming(replica, streams)

    def free(self, replica: str) -> None:
        """Free what was put for a replica; its engines have loaded it, or never will."""
        self._transports[replica].free(self._handles.pop(replica, ()))

    def close(self) -> None:
        """Free everything that was put."""
        for replica in tuple(self._handles):
            self.free(replica)


class WorkerRoutes:
    """The weight routes of one worker process.

    Args:
        plan: gives the routes.
        hosted: indices of the workers that this process hosts.
        backends: replica -> its shard here.
    """

    def __init__(self, plan: Plan, hosted: Sequence[int], backends: Mapping[str, ModelBackend]) -> None:
        self._plan = plan
        self._worker = hosted[0]
        self._hosts_all = len(hosted) == plan.cluster.num_devices
        self._backends = backends

    def outgoing(self, replica: str) -> OutgoingWeights:
        """Return what this process sends to a generation replica that pulls weights.

        A route with rows says what each worker sends, without a collective. By a route without rows, the
        worker of the source's rank 0 sends everything, and the others take part in gathering it. A process
        that hosts all workers sends to itself.
        """
        route = self._route(replica)
        backend = self._backends[route.src]
        if self._hosts_all:
            return OutgoingWeights(outgoing_tensors((self._worker,), backend, True))
        if route.rows:
            return OutgoingWeights(outgoing_slices(route, self._plan.cluster, self._worker, backend))
        is_sender = self._plan.replica(route.src).workers[0] == self._worker
        return OutgoingWeights(outgoing_tensors(self._plan.replica(replica).workers, backend, is_sender))

    def incoming(self, replica: str, streams: Sequence[Iterable[Bucket]]) -> IncomingWeights:
        """Return weights assembled from what others sent and from what this worker holds itself."""
        route = self._route(replica)
        backend = None if self._hosts_all else self._backends.get(route.src)
        local = () if backend is None else local_slices(route, self._worker, backend)
        return IncomingWeights(streams, local)

    def _route(self, replica: str) -> WeightRoute:
        return next(route for route in self._plan.weights if route.dst == replica)


def make_transports(plan: Plan, directory: str, worker: int, default: Transport) -> dict[str, Transport]:
    """Return the transport of each generation replica's weights, as planned.

    Args:
        plan: says which weights are sent through files.
        directory: for these files.
        worker: the index of this process's first worker.
        default: the transport of all other weights.
    """
    return {
        route.dst: DiskTransport(Path(directory), f"{route.dst}-{worker}")
        if route.transport == "disk"
        else default
        for route in plan.weights
    }


def _buckets(transport: Transport, handles: Sequence[Any]) -> Iterator[Bucket]:
    for handle in handles:
        yield transport.take(handle)
