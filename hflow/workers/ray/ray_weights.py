"""Sends published weights to engines over Ray, on the controller's side. It handles references and numbers.

Ray delivers the messages of one caller to an actor in order, and holds all of them while an argument of the
first is not ready. So a separate engine receives its message to load only after everything is published;
otherwise its other messages would wait for the trainer's device.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hflow.planner.plan.routing import tensor_ranks
from hflow.planner.plan.rows import Plan, Replica, WeightRoute
from hflow.weights.checksum import MODULUS
from hflow.workers.hangs.hang_detector import WorkerCall
from hflow.workers.interface import Span, WeightsLoaded, publish_span
from hflow.workers.messages import activity_of

if TYPE_CHECKING:
    from hflow.weights.loading import LoadedWeights
    from hflow.weights.publisher import PublishReport

Send = Callable[..., Any]
"""(worker, method, arguments ...) -> a reference for each value that the actor's method returns."""
Call = Callable[..., Awaitable[Any]]
"""(worker, method, arguments ...) -> answer."""
WaitAll = Callable[[WorkerCall, Mapping[int, Any]], Any]
"""(call, worker -> reference) -> answers. Waits for several devices, and names a missing rank."""


@dataclass(frozen=True)
class _Publication:
    """Weights that are being published, or have been."""

    handles: tuple[Any, ...]
    """A reference to each sender's bucket handles."""
    call: WorkerCall
    reports: Mapping[int, Any]
    """Sender -> reference to its `PublishReport`."""
    num_losses: int
    """Engines that the replica had lost when it began."""


class RayWeights:
    """Publishes and loads weights, by messages to the devices of senders and engines."""

    def __init__(self, plan: Plan, send: Send, wait_all: WaitAll, call: Call) -> None:
        self._plan = plan
        self._send = send
        self._wait_all = wait_all
        self._call = call
        self._routes = {route.dst: route for route in plan.weights if route.how == "pull"}
        self._handed_over = frozenset(route.dst for route in plan.weights if route.hands_over)
        """Engine replicas to which every worker of the trainer hands weights over."""
        self._published: dict[str, _Publication] = {}
        """Engine replica -> weights that it has not loaded yet."""
        self._versions: dict[str, int] = {}
        self._num_losses: Counter[str] = Counter()
        """Engine replica -> how often it has lost an engine."""

    async def publish(self, replica: str, version: int) -> tuple[tuple[int, Span], ...]:
        """Let senders publish; returns each one's span. Messages are sent before anything is awaited."""
        publication = self._published[replica] = self._start_publishing(self._routes[replica], version)
        reports = await self._reports(publication)
        return tuple((worker, publish_span(report)) for worker, report in reports.items())

    async def wake(self, replica: str, version: int) -> WeightsLoaded:
        """Let engines load new weights, published before or now, and start them.

        What was published is freed before any of them allocates its KV cache.
        """
        is_new = self._versions.get(replica) != version
        self._versions[replica] = version
        publication = self._published.pop(replica, None)
        if publication is None and is_new and replica in self._routes:
            publication = self._start_publishing(self._routes[replica], version)
        engine = self._plan.replica(replica)
        handles = () if publication is None else publication.handles
        workers = engine.workers if replica in self._handed_over else engine.heads
        loading = self._call_workers(engine, workers, "load_weights", replica, version, *handles)
        tasks = [asyncio.ensure_future(loading)]
        if publication is not None:
            tasks.append(asyncio.ensure_future(self._reports(publication)))
        try:
            loaded, *reports = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            if publication is not None:
                await self._free(replica, publication)
        await self._call_workers(engine, engine.heads, "wake", replica)
        updates = dict(zip(workers, loaded, strict=True))
        return _weights_loaded(
            engine, [updates[head] for head in engine.heads], reports[0] if reports else {}
        )

    def forget(self, replica: str) -> None:
        """Note that a replica has lost an engine, so that everything it has is to be sent again."""
        self._versions.pop(replica, None)
        self._published.pop(replica, None)
        self._num_losses[replica] += 1

    def _start_publishing(self, route: WeightRoute, version: int) -> _Publication:
        source, num_losses = self._plan.replica(route.src), self._num_losses[route.dst]
        references = {
            worker: self._send(worker, "publish", route.dst, version, num_losses) for worker in source.workers
        }
        handles, reports = zip(*references.values(), strict=True)
        call = _replica_call(source, "publish", route.dst, version)
        return _Publication(handles, call, dict(zip(references, reports, strict=True)), num_losses)

    def _call_workers(self, engine: Replica, workers: Sequence[int], method: str, *arguments: Any) -> Any:
        """Send a message to workers of a generation replica; return an awaitable of their answers."""
        answers = {worker: self._send(worker, method, *arguments) for worker in workers}
        return self._wait_all(_replica_call(engine, method, *arguments), answers)

    async def _reports(self, publication: _Publication) -> dict[int, PublishReport]:
        reports = await self._wait_all(publication.call, publication.reports)
        return dict(zip(publication.reports, reports, strict=True))

    async def _free(self, replica: str, publication: _Publication) -> None:
        freeing = (
            self._call(worker, "free_weights", replica, publication.num_losses)
            for worker in publication.reports
        )
        await asyncio.gather(*freeing)


def _weights_loaded(
    engine: Replica, updates: Sequence[LoadedWeights | None], reports: Mapping[int, PublishReport]
) -> WeightsLoaded:
    """Combine what the ranks of all engines of a replica loaded with what senders report for each rank."""
    sent: list[int] = []
    loaded: list[int] = []
    num_bytes = 0
    for dp_head, update in zip(engine.heads, updates, strict=True):
        if update is not None:
            num_bytes += sum(update.num_bytes)
            loaded += update.checksums
            for worker, local in zip(tensor_ranks(engine, dp_head), update.local_checksums, strict=True):
                sent.append(local + sum(report.checksums.get(worker, 0) for report in reports.values()))
    return WeightsLoaded(num_bytes, tuple(checksum % MODULUS for checksum in sent), tuple(loaded))


def _replica_call(replica: Replica, method: str, *arguments: Any) -> WorkerCall:
    return WorkerCall(activity_of(method, *arguments), tuple(sorted(replica.workers)), replica)
