"""`RayWorkers`: one Ray actor a device. The controller sends and receives names and numbers.

What moves between stores, and weights on their way to engines, go through Ray's object store
from actor to actor: this process handles references to them only (contract 7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from hflow.errors import RunError
from hflow.plan.ir import Plan
from hflow.workers.base import (
    ComputeOrder,
    GroupOrder,
    Move,
    NodeResult,
    NodeTask,
    Report,
    WorkerSetup,
    Workers,
)
from hflow.workers.ray_actor import LANES, WorkerActor
from hflow.workers.ray_cluster import Reservation, reserve
from hflow.workers.transfer import by_ends
from hflow.workers.world import Membership

CLOSE_SECONDS = 10.0
"""Longest wait for workers to end their processes before they are killed."""


class RayWorkers(Workers):
    """The workers of one run. Its methods are called from one event loop.

    Messages to a worker's device are sent before a method awaits anything, so workers see them
    in the order of the calls.
    """

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._reservation: Reservation | None = None
        self._plan: Plan
        self._doing: dict[int, str] = {}

    async def start(self, setup: WorkerSetup) -> None:
        self._plan = setup.plan
        cluster = setup.plan.cluster
        self._reservation = await asyncio.to_thread(reserve, cluster)
        remote = ray.remote(concurrency_groups=LANES)(WorkerActor)
        self._actors = [
            remote.options(**self._reservation.options(worker)).remote(worker)
            for worker in range(cluster.num_devices)
        ]
        address = await self._call(0, "starting", "rendezvous")
        shared = ray.put(setup)
        members = [Membership(worker, len(self._actors), address) for worker in self._everyone()]
        await self._call_all({worker: (shared, members[worker]) for worker in self._everyone()}, "building its models", "build")

    async def open_groups(self, worker: int, orders: Sequence[GroupOrder]) -> None:
        await self._call(worker, "opening groups", "open_groups", orders)

    async def compute(self, worker: int, orders: Sequence[ComputeOrder]) -> None:
        await self._call(worker, "taking compute orders", "compute", orders)

    async def poll(self, worker: int) -> Report:
        report: Report = await self._call(worker, "idle", "poll")
        return report
