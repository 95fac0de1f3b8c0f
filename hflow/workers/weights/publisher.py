"""`WeightPublisher`: weights that this process published for engines, and those that its engines load."""

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
from hflow.workers.weights.transfer import (
    IncomingWeights,
    OutgoingWeights,
    own_slices,
    sent_slices,
    sent_whole,
)
from hflow.workers.weights.transports.disk import DiskTransport
from hflow.workers.weights.transports.interface import Transport

# -------------------- `WorkerRoutes`: what this worker sends of weights, and what arrives at its engines, as
# the plan's routes say.


class WorkerRoutes:
    """The weight routes of one worker process.

    Args:
        plan: whose routes they are.
        hosted: indices of the workers that live in this process.
        backends: replica -> its shard here.
    """

    def __init__(self, plan: Plan, hosted: Sequence[int], backends: Mapping[str, ModelBackend]) -> None:
        self._plan = plan
        self._worker = hosted[0]
        self._hosts_all = len(hosted) == plan.cluster.num_devices
        self._backends = backends

    def leaving(self, replica: str) -> OutgoingWeights:
        """What this process sends of the weights that a generation replica pulls, and to whom.

        By the rows of its route, and not a collective; where the route has none, the worker of the source's
        rank 0 sends all and the others take part. Where all workers are one process it sends to itself.
        """
        route = self._of(replica)
        backend = self._backends[route.src]
        if self._hosts_all:
            return OutgoingWeights(sent_whole((self._worker,), backend, True))
        if route.rows:
            return OutgoingWeights(sent_slices(route, self._plan.cluster, self._worker, backend))
        is_sender = self._plan.replica(route.src).workers[0] == self._worker
        return OutgoingWeights(sent_whole(self._plan.replica(replica).workers, backend, is_sender))

    def arriving(self, replica: str, streams: Sequence[Iterable[Bucket]]) -> IncomingWeights:
        """Weights out of what others sent, and of what this worker holds itself."""
        route = self._of(replica)
        backend = None if self._hosts_all else self._backends.get(route.src)
        return IncomingWeights(streams, () if backend is None else own_slices(route, self._worker, backend))

    def _of(self, replica: str) -> WeightRoute:
        return next(route for route in self._plan.weights if route.dst == replica)


Handles = list[tuple[Receivers, list[Any]]]
"""Who takes which buckets, in order."""


@dataclass(frozen=True)
class Sent:
    """What the controller learns of weights that a process published."""

    digests: Mapping[int, int]
    """Receiver -> digest of what it was sent."""
    span: Span


class WeightPublisher:
    """Publishes and frees on the sender's side; opens on the receiver's.

    Args:
        routes: what goes where.
        worker: the index of this process's first worker.
        transports: generation replica -> the way that its weights take.
    """

    def __init__(self, routes: WorkerRoutes, worker: int, transports: Mapping[str, Transport]) -> None:
        self._routes = routes
        self._worker = worker
        self._transports = transports
        self._kept: dict[str, list[Any]] = {}
        """Replica -> handles of what was put for it and not freed."""

    def publish(self, replica: str, version: int) -> tuple[Handles, Sent]:
        """Put what a generation replica needs of the weights here where its workers can take it."""
        start = time.time()
        transport, leaving = self._transports[replica], self._routes.leaving(replica)
        handles: dict[Receivers, list[Any]] = {}
        kept = self._kept.setdefault(replica, [])
        num_bytes = 0
        for receivers, bucket in leaving:
            kept.append(transport.put(bucket))
            handles.setdefault(receivers, []).append(kept[-1])
            num_bytes += bucket.num_bytes
        note = {"version": version, "bytes": num_bytes}
        span = Span(f"publish {replica}", "weights", start, time.time(), note)
        return list(handles.items()), Sent(leaving.digests, span)

    def arriving(self, replica: str, sent: Sequence[Handles]) -> IncomingWeights:
        """What a replica's engine here loads of what each sender put."""
        transport = self._transports[replica]
        streams = [
            _taken(transport, handles)
            for by_one in sent
            for receivers, handles in by_one
            if self._worker in receivers
        ]
        return self._routes.arriving(replica, streams)

    def free(self, replica: str) -> None:
        """Free what was put for a replica; its engines have loaded it, or never will."""
        self._transports[replica].free(self._kept.pop(replica, ()))

    def close(self) -> None:
        """Free all that is left."""
        for replica in tuple(self._kept):
            self.free(replica)


def transports(plan: Plan, exchange: str, worker: int, store: Transport) -> dict[str, Transport]:
    """The way of each generation replica's weights, as planned.

    Args:
        plan: says which go by disk.
        exchange: directory for those.
        worker: the index of this process's first worker.
        store: the way of all others.
    """
    return {
        route.dst: DiskTransport(Path(exchange), f"{route.dst}-{worker}")
        if route.transport == "disk"
        else store
        for route in plan.weights
    }


def _taken(transport: Transport, handles: Sequence[Any]) -> Iterator[Bucket]:
    for handle in handles:
        yield transport.take(handle)
