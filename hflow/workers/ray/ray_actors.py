"""`RayActors`: one Ray actor a device, for one run or for several, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from hflow.planner.ir import ClusterSpec
from hflow.workers.ray.ray_actor import RayWorker
from hflow.workers.ray.ray_cluster import Reservation, reserve

CLOSE_SECONDS = 10.0
"""Longest wait for workers to end their processes before they are killed."""


class RayActors:
    """Started with the first run, for its cluster; a later run may be smaller.

    Starting them is most of what a short run takes: they import torch.
    """

    def __init__(self, cluster: ClusterSpec, environments: Sequence[Mapping[str, str]] = ()) -> None:
        """Prepare.

        Args:
            cluster: the devices.
            environments: environment variables of each process, where there are any.
        """
        self._cluster = cluster
        self._environments = environments or [{}] * cluster.num_devices
        self._reservation: Reservation | None = None
        self._actors: list[Any] = []

    def start(self) -> None:
        """Reserve the cluster's devices and start an actor on each; nothing where that is done.

        To be called on a thread that lives as long as they: Ray's daemons end with the one that started them.

        Raises:
            RunError: when the Ray cluster is too small.
        """
        if self._reservation is None:
            self._reservation = reserve(self._cluster)
            self._actors = [
                RayWorker.options(**self._reservation.options(worker, variables)).remote(worker)
                for worker, variables in enumerate(self._environments)
            ]

    def actors(self, num_devices: int) -> list[Any]:
        """The actors of the first so many devices."""
        assert num_devices <= len(self._actors), f"{num_devices} workers of {len(self._actors)}"
        return self._actors[:num_devices]

    async def close(self) -> None:
        """End the processes, and free what was reserved or started. Safe to call twice."""
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)
        if self._reservation is not None:
            await asyncio.to_thread(self._reservation.free)
            self._reservation = None


async def end_work(actors: list[Any]) -> None:
    """Let workers end their threads and pools; a worker that does not answer is left as it is."""
    if actors:
        closing = [actor.close.remote() for actor in actors]
        await asyncio.to_thread(ray.wait, closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
