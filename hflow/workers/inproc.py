"""`InprocWorkers`: the whole plan in this process, for tests, debuggers and machines without Ray.

One `Worker` hosts every index: all dp shards of a replica go through one backend, which changes
no result as all denominators are global, and what the plan moves is already there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from hflow.workers.base import (
    ComputeOrder,
    GroupOrder,
    Move,
    NodeResult,
    NodeTask,
    Report,
    Workers,
    WorkerSetup,
)
from hflow.workers.worker import Worker

T = TypeVar("T")


class InprocWorkers(Workers):
    """Blocking work happens on threads: one for the device, in the order of the calls, one a poll."""

    def __init__(self) -> None:
        self._device = ThreadPoolExecutor(1, "hflow-device")
        self._worker: Worker
        self._threads: ThreadPoolExecutor
        self._started = False

    async def start(self, setup: WorkerSetup) -> None:
        """Build the one worker."""
        hosted = tuple(range(setup.plan.cluster.num_devices))
        self._threads = ThreadPoolExecutor(2 * len(hosted), "hflow-worker")
        self._worker = await self._on_device(lambda: Worker(setup, hosted))
        self._started = True

    async def open_groups(self, worker: int, orders: Sequence[GroupOrder]) -> None:
        """Start sources."""
        self._worker.open_groups(worker, orders)

    async def give_up(self, worker: int, stream: str, groups: Sequence[int]) -> list[GroupOrder]:
        """Stop groups that another worker goes on with."""
        return await self._on_thread(lambda: self._worker.give_up(worker, stream, groups))

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

    async def wake(self, replica: str, version: int) -> int:
        """Bring a generation replica to a version and start it."""
        return await self._on_device(lambda: self._worker.wake(replica, version))

    async def sleep(self, replica: str) -> None:
        """Interrupt a generation replica."""
        await self._on_device(lambda: self._worker.sleep(replica))

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
            self._threads.shutdown()
        self._device.shutdown()

    async def _on_device(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._device, work)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
