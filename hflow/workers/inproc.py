"""`InprocWorkers`: the whole plan in this process, for tests, debuggers and machines without Ray.

One `Worker` hosts every index: all dp shards of a replica go through one backend, which changes
no result as all denominators are global, and what the plan moves is already there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from hflow.planner.data.redistribute import Move
from hflow.workers.interface import (
    ComputeOrder,
    GroupOrder,
    NodeResult,
    NodeTask,
    Report,
    Span,
    WeightsLoaded,
    Workers,
    WorkerSetup,
)
from hflow.workers.weights.publisher import Handles, Sent
from hflow.workers.weights.transports.memory import MemoryTransport
from hflow.workers.worker import Worker

T = TypeVar("T")


class InprocWorkers(Workers):
    """Blocking work happens on threads: one for the device, in the order of the calls, one a poll.

    Engines for which weights are published have a thread each, as they would have a device.
    """

    def __init__(self) -> None:
        self._device = ThreadPoolExecutor(1, "hflow-device")
        self._apart: dict[str, ThreadPoolExecutor] = {}
        self._published: dict[str, tuple[Handles, Sent]] = {}
        self._worker: Worker
        self._threads: ThreadPoolExecutor
        self._started = False

    async def start(self, setup: WorkerSetup) -> None:
        """Build the one worker."""
        hosted = tuple(range(setup.plan.cluster.num_devices))
        self._threads = ThreadPoolExecutor(2 * len(hosted), "hflow-worker")
        self._worker = await self._on_device(lambda: Worker(setup, hosted, MemoryTransport()))
        for replica, _ in setup.plan.schedule.publishers:
            self._apart[replica] = ThreadPoolExecutor(1, f"hflow-{replica}")
        self._started = True

    async def open_groups(self, worker: int, orders: Sequence[GroupOrder]) -> None:
        """Start sources."""
        self._worker.open_groups(worker, orders)

    async def detach_groups(self, worker: int, stream: str, groups: Sequence[int]) -> list[GroupOrder]:
        """Stop groups that another worker goes on with."""
        return await self._on_thread(lambda: self._worker.detach_groups(worker, stream, groups))

    async def compute(self, worker: int, orders: Sequence[ComputeOrder]) -> None:
        """Queue sample- and group-level bodies."""
        self._worker.compute(worker, orders)

    async def poll(self, worker: int) -> Report:
        """Wait for events of one worker index."""
        return await self._on_thread(lambda: self._worker.poll(worker))

    async def transfer(self, moves: Sequence[Move]) -> int:
        """Nothing to do: every store is the same."""
        return 0

    async def run(self, tasks: Mapping[int, NodeTask]) -> list[NodeResult]:
        """Run a batch node on the shards of all tasks together."""
        return await self._on_device(lambda: self._worker.run(tasks))

    async def publish(self, replica: str, version: int) -> tuple[tuple[int, Span], ...]:
        """Copy weights for an engine, in the device's turn."""
        self._published[replica] = await self._on_device(lambda: self._worker.publish(replica, version))
        return ((0, self._published[replica][1].span),)

    async def wake(self, replica: str, version: int) -> WeightsLoaded:
        """Bring a generation replica to a version and start it."""
        if replica in self._apart and self._worker.lacks(replica, version) and replica not in self._published:
            await self.publish(replica, version)
        handles, sent = self._published.pop(replica, (None, None))
        given = None if handles is None else [handles]
        taken = await self._on_lane(replica, lambda: self._worker.wake(replica, version, given))
        if taken is None:
            return WeightsLoaded()
        if sent is None:
            return WeightsLoaded(0, (taken.local_checksum,), (taken.engine_checksum,))
        await self._on_thread(lambda: self._worker.free(replica))
        return WeightsLoaded(0, tuple(sent.digests.values()), (taken.engine_checksum,))

    async def sleep(self, replica: str) -> None:
        """Interrupt a generation replica."""
        await self._on_lane(replica, lambda: self._worker.sleep(replica))

    async def release(
        self, worker: int, samples: Sequence[int], stream: str, fields: Sequence[str] | None
    ) -> None:
        """Free fields of samples."""
        self._worker.release(samples, stream, fields)

    async def summarize(
        self, worker: int, stream: str, samples: Sequence[int]
    ) -> dict[str, tuple[float, int]]:
        """Sums and counts of numeric fields."""
        return await self._on_thread(lambda: self._worker.summarize(stream, samples))

    async def save(self, model: str, directory: str) -> None:
        """Write a model and its tokenizer."""
        await self._on_device(lambda: self._worker.save(model, directory))

    async def close(self) -> None:
        """End threads and processes."""
        if self._started:
            self._started = False
            await asyncio.to_thread(self._worker.close)
            for lane in (self._threads, *self._apart.values()):
                lane.shutdown()
        self._device.shutdown()

    async def _on_device(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._device, work)

    async def _on_lane(self, replica: str, work: Callable[[], T]) -> T:
        """On the thread of an engine apart, or the device's."""
        lane = self._apart.get(replica, self._device)
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
