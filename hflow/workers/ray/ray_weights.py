"""`RayWeights`: the controller's side of weights on their way over Ray. It handles references and numbers.

Ray hands an actor the messages of one caller in their order, and holds them all while an argument of the
first is not there. So an engine apart is told to load when all has been published: before, its other
messages would wait behind the trainer's device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.planner.ir import Plan, Replica, WeightRoute
from hflow.workers.generation.engine_manager import EngineUpdate
from hflow.workers.hangs.hang_report import WorkerCall
from hflow.workers.interface import Span, WeightsLoaded
from hflow.workers.weights.checksum import MODULUS
from hflow.workers.weights.publisher import Sent

Send = Callable[..., Any]
"""(worker, method, arguments ...) -> what the actor's method gives at once."""
WaitAll = Callable[[WorkerCall, Mapping[int, Any]], Any]
"""Waits for the answers of several devices that work together, and finds who does not come."""


@dataclass(frozen=True)
class _Shipment:
    """Weights that were published, or are about to be."""

    handles: tuple[Any, ...]
    """A reference to what each sender put."""
    call: WorkerCall
    notes: Mapping[int, Any]
    """Sender -> reference to its `Sent`."""


class RayWeights:
    """Publishes and loads, by messages to the devices of both ends.

    Args:
        plan: for routes and replicas.
        send: sends one message.
        wait_all: waits for answers.
    """

    def __init__(self, plan: Plan, send: Send, wait_all: WaitAll) -> None:
        self._plan = plan
        self._send = send
        self._wait_all = wait_all
        self._routes = {route.dst: route for route in plan.weights if route.how == "pull"}
        self._shipments: dict[str, _Shipment] = {}
        self._versions: dict[str, int] = {}

    async def publish(self, replica: str, version: int) -> tuple[tuple[int, Span], ...]:
        """Let senders publish; returns each one's span. Messages are sent before anything is awaited."""
        shipment = self._shipments[replica] = self._ship(self._routes[replica], version)
        sent = await self._notes(shipment)
        return tuple((worker, note.span) for worker, note in sent.items())

    async def wake(self, replica: str, version: int) -> WeightsLoaded:
        """Let engines load, what is published now where that has not been done, and wake them."""
        is_new = self._versions.get(replica) != version
        self._versions[replica] = version
        shipment = self._shipments.pop(replica, None)
        if shipment is None and is_new and replica in self._routes:
            shipment = self._ship(self._routes[replica], version)
        engine = self._plan.replica(replica)
        handles = () if shipment is None else shipment.handles
        answers = {
            worker: self._send(worker, "wake", replica, version, *handles) for worker in engine.workers
        }
        call = _together(f"loading weights {version} into {replica}", engine)
        waiting = [asyncio.ensure_future(self._wait_all(call, answers))]
        if shipment is not None:
            waiting.append(asyncio.ensure_future(self._notes(shipment)))
        try:
            taken, *notes = await asyncio.gather(*waiting)
        finally:
            for left in waiting:
                left.cancel()
        if shipment is not None:
            await self._free(replica, shipment)
        return _confirmed(engine, taken, notes[0] if notes else {})

    def _ship(self, route: WeightRoute, version: int) -> _Shipment:
        source = self._plan.replica(route.src)
        sent = {worker: self._send(worker, "publish", route.dst, version) for worker in source.workers}
        call = _together(
            f"sending weights {version} of {route.src}", source, f"sending weights to {route.dst}"
        )
        handles, notes = zip(*sent.values(), strict=True)
        return _Shipment(handles, call, dict(zip(sent, notes, strict=True)))

    async def _notes(self, shipment: _Shipment) -> dict[int, Sent]:
        return dict(zip(shipment.notes, await self._wait_all(shipment.call, shipment.notes), strict=True))

    async def _free(self, replica: str, shipment: _Shipment) -> None:
        await asyncio.gather(*(self._send(worker, "free", replica) for worker in shipment.notes))


def _confirmed(
    engine: Replica, taken: Sequence[EngineUpdate | None], notes: Mapping[int, Sent]
) -> WeightsLoaded:
    """What all ranks of an engine took, beside what senders noted for each of them."""
    took = {worker: one for worker, one in zip(engine.workers, taken, strict=True) if one is not None}
    sent = {worker: sum(note.digests.get(worker, 0) for note in notes.values()) for worker in took}
    return WeightsLoaded(
        num_bytes=sum(one.num_bytes for one in took.values()),
        sent=tuple((one.local_checksum + sent[worker]) % MODULUS for worker, one in took.items()),
        held=tuple(one.engine_checksum for one in took.values()),
    )


def _together(doing: str, replica: Replica, title: str = "") -> WorkerCall:
    """What all workers of a replica do together."""
    return WorkerCall(title or doing, doing, tuple(sorted(replica.workers)), replica)
