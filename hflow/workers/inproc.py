"""All workers of a plan in this process, for tests, debuggers and machines without Ray.

One `Worker` hosts every worker index. All dp shards of a replica go through one backend, which does not
change results because all denominators are global. Moves between workers have nothing to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from typing_extensions import override

from hflow.base.waiting import WaitFor, wait_silently
from hflow.data_plane.redistribute import Moves
from hflow.planner.plan.rows import Replica
from hflow.weights.publisher import BucketHandles, PublishReport
from hflow.workers.interface import (
    NodeResult,
    NodeTask,
    Span,
    WeightsLoaded,
    Workers,
    WorkerSetup,
    build_phase,
    publish_span,
    replicas_text,
)
from hflow.workers.messages import MESSAGES
from hflow.workers.real_devices import check_devices, find_devices
from hflow.workers.worker import Worker

T = TypeVar("T")


class InprocWorkers(Workers):
    """Runs blocking work on threads: for the device, in the order of the calls, for disks, and per poll.

    Each engine that weights are published for has a thread of its own, as it would have a device.
    """

    def __init__(self) -> None:
        self._device = ThreadPoolExecutor(1, "hflow-device")
        self._disk = ThreadPoolExecutor(1, "hflow-disk")
        self._separate_engines: dict[str, ThreadPoolExecutor] = {}
        self._published: dict[str, tuple[BucketHandles, PublishReport]] = {}
        """Engine replica -> weights that it has not loaded yet."""
        self._pulling: frozenset[str] = frozenset()
        """Engine replicas that load what is published."""
        self._worker: Worker
        self._threads: ThreadPoolExecutor
        self._started = False

    @override
    async def start(
        self,
        setup: WorkerSetup,
        report_progress: Callable[[str], None] = lambda line: None,
        wait_for: WaitFor = wait_silently,
    ) -> None:
        report_progress(build_phase(setup.plan))
        self._plan = setup.plan
        hosted = tuple(range(setup.plan.cluster.num_devices))
        self._threads = ThreadPoolExecutor(2 * len(hosted), "hflow-worker")
        with wait_for(replicas_text(setup.plan, hosted) or "the worker"):
            self._worker = await _on(self._device, lambda: _build(setup, hosted))
        self._pulling = frozenset(route.dst for route in setup.plan.weights if route.how == "pull")
        for replica, _ in setup.plan.schedule.publishers:
            self._separate_engines[replica] = ThreadPoolExecutor(1, f"hflow-{replica}")
        self._started = True

    @override
    async def transfer(self, moves: Moves) -> int:
        """Do nothing: all workers share one store."""
        return 0

    @override
    async def run(self, tasks: Mapping[int, NodeTask]) -> list[NodeResult]:
        """Run a batch node on the shards of all tasks together."""
        return await _on(self._device, lambda: self._worker.run(tasks))

    @override
    async def publish(self, replica: str, version: int) -> tuple[tuple[int, Span], ...]:
        published = await _on(self._device, lambda: self._worker.publish(replica, version))
        self._published[replica] = published
        return ((0, publish_span(published[1])),)

    @override
    async def wake(self, replica: str, version: int) -> WeightsLoaded:
        is_new = replica in self._pulling and self._worker.needs_weights(replica, version)
        if is_new and replica not in self._published:
            await self.publish(replica, version)
        handles, report = self._published.pop(replica, (None, None))
        published = () if handles is None else (handles,)
        update = await self._on_device_of(
            replica, lambda: self._worker.load_weights(replica, version, *published)
        )
        if report is not None:
            await _on(self._threads, lambda: self._worker.free_weights(replica))
        await self._on_device_of(replica, lambda: self._worker.wake(replica))
        if update is None:
            return WeightsLoaded()
        if report is None:
            return WeightsLoaded(0, update.local_checksums, update.checksums)
        sent = tuple(report.checksums.values()) * len(update.checksums)
        return WeightsLoaded(0, sent, update.checksums)

    @override
    async def close(self) -> None:
        if self._started:
            self._started = False
            await asyncio.to_thread(self._worker.close)
            for executor in (self._threads, self._disk, *self._separate_engines.values()):
                executor.shutdown()
        self._device.shutdown()

    @override
    async def _call(self, worker: int, method: str, *arguments: Any) -> Any:
        receive = getattr(self._worker, method)
        if MESSAGES[method].is_quick:
            return receive(*arguments)
        executor = self._disk if MESSAGES[method].lane == "disk" else self._threads
        return await _on(executor, lambda: receive(*arguments))

    @override
    async def _call_replica(self, replica: Replica, method: str, *arguments: Any) -> None:
        receive = getattr(self._worker, method)
        await self._on_device_of(replica.name, lambda: receive(*arguments))

    async def _on_device_of(self, replica: str, work: Callable[[], T]) -> T:
        return await _on(self._separate_engines.get(replica, self._device), work)


async def _on(executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(executor, work)


def _build(setup: WorkerSetup, hosted: tuple[int, ...]) -> Worker:
    """Build the worker on the devices that this process finds."""
    found = find_devices()
    check_devices(setup.plan, [found], found.versions)
    return Worker(setup, hosted, devices=found.names)
