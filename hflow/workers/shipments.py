"""`Shipments`: weights that this process published for engines, and those that its engines load."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.plan.ir import Plan
from hflow.plan.slices import Receivers
from hflow.workers.base import Span
from hflow.workers.routes import Routes
from hflow.workers.transfer import Arriving
from hflow.workers.transports.base import Transport
from hflow.workers.transports.disk import DiskTransport
from hflow.workers.weights import Bucket

Handles = list[tuple[Receivers, list[Any]]]
"""Who takes which buckets, in order."""


@dataclass(frozen=True)
class Sent:
    """What the controller learns of weights that a process published."""

    digests: Mapping[int, int]
    """Receiver -> digest of what it was sent."""
    span: Span


class Shipments:
    """Publishes and frees on the sender's side; opens on the receiver's.

    Args:
        routes: what goes where.
        worker: the index of this process's first worker.
        transports: generation replica -> the way that its weights take.
    """

    def __init__(self, routes: Routes, worker: int, transports: Mapping[str, Transport]) -> None:
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

    def arriving(self, replica: str, sent: Sequence[Handles]) -> Arriving:
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
