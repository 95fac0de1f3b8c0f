"""`RayWorkers`: one Ray actor a device. The controller sends and receives names and numbers.

What moves between stores, and weights on their way to engines, goes from actor to actor: this
process handles ids and references only (contract 7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from hflow.errors import HflowError, RunError
from hflow.plan.ir import Plan
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
from hflow.workers.ray_processes import RayProcesses, end_work
from hflow.workers.ship import ship
from hflow.workers.transfer import by_ends
from hflow.workers.world import Membership


class RayWorkers(Workers):
    """The workers of one run. Its methods are called from one event loop.

    Messages to a worker's device are sent before a method awaits anything, so that all workers
    see them in the order of the calls.
    """

    def __init__(self, processes: RayProcesses | None = None) -> None:
        """Prepare a run.

        Args:
            processes: those of several runs, which are left as they are; None: this run starts its own.
        """
        self._actors: list[Any] = []
        self._processes = processes
        self._owns_processes = processes is None
        self._plan: Plan
        self._doing: dict[int, list[str]] = {}
        """worker -> what it was asked to do on its device and has not answered."""
        self._died: dict[int, str] = {}
        """worker -> what it did when it died."""
        self._versions: dict[str, int] = {}

    async def start(self, setup: WorkerSetup) -> None:
        """Start actors at the same time, then build worlds and models in them."""
        self._plan = setup.plan
        self._processes = self._processes or RayProcesses(setup.plan.cluster)
        self._processes.start()
        everyone = range(setup.plan.cluster.num_devices)
        self._doing = {worker: [] for worker in everyone}
        self._actors = self._processes.actors(len(everyone))
        bodies = [program.body for program in setup.programs.values()]
        shared = ray.put(ship(setup, bodies))
        address = await self._call(0, "rendezvous") if len(everyone) > 1 else ""
        members = [Membership(worker, len(everyone), address) if address else None for worker in everyone]
        await self._on_devices(
            "building its models",
            "build",
            {worker: (shared, members[worker], self._actors) for worker in everyone},
        )

    async def open_groups(self, worker: int, orders: Sequence[GroupOrder]) -> None:
        """Start sources."""
        await self._call(worker, "open_groups", orders)

    async def compute(self, worker: int, orders: Sequence[ComputeOrder]) -> None:
        """Queue sample- and group-level bodies."""
        await self._call(worker, "compute", orders)

    async def poll(self, worker: int) -> Report:
        """Wait for events."""
        report: Report = await self._call(worker, "poll")
        return report

    async def transfer(self, moves: Sequence[Move]) -> int:
        """Let destinations pull from sources, behind what their devices were asked to do before."""
        sent = {dst: self._send(dst, "pull", wanted) for dst, wanted in by_ends(moves).items()}
        return sum(await asyncio.gather(*(self._answer(dst, pulled) for dst, pulled in sent.items())))

    async def run(self, tasks: Mapping[int, NodeTask]) -> list[NodeResult]:
        """Run a batch node on all its workers at once; results in the order of `tasks`."""
        first = next(iter(tasks.values()))
        doing = f"running node {first.node!r} of step {first.step}"
        return await self._on_devices(doing, "run", {worker: (task,) for worker, task in tasks.items()})

    async def wake(self, replica: str, version: int) -> int:
        """Let sources publish weights where the route says so, and bring engines to the version."""
        route = next((route for route in self._plan.weights if route.dst == replica), None)
        sending: list[Any] = []
        published: list[Any] = []
        if route is not None and route.how == "pull" and self._versions.get(replica) != version:
            sources = self._plan.replica(route.src).workers
            sent = self._send_all("publish", dict.fromkeys(sources, (replica,)))
            published = list(sent.values())
            sending.append(self._wait_all(f"sending weights {version} of {route.src}", sent))
        self._versions[replica] = version
        workers = self._plan.replica(replica).workers
        sent = self._send_all("wake", dict.fromkeys(workers, (replica, version, *published)))
        loading = self._wait_all(f"loading weights {version} into {replica}", sent)
        pulled, *_ = await asyncio.gather(loading, *sending)
        return sum(pulled)

    async def sleep(self, replica: str) -> None:
        """Interrupt engines."""
        workers = self._plan.replica(replica).workers
        await self._on_devices(f"interrupting {replica}", "sleep", dict.fromkeys(workers, (replica,)))

    async def release(
        self, worker: int, samples: Sequence[int], stream: str, fields: Sequence[str] | None
    ) -> None:
        """Free fields of samples."""
        await self._call(worker, "release", samples, stream, fields)

    async def summarize(
        self, worker: int, stream: str, samples: Sequence[int]
    ) -> dict[str, tuple[float, int]]:
        """Sums and counts of numeric fields."""
        sums: dict[str, tuple[float, int]] = await self._call(worker, "summarize", stream, samples)
        return sums

    async def save(self, model: str, directory: str) -> None:
        """Write a model; a collective over its replica."""
        replica = next(r for r in self._plan.replicas if r.model == model and r.role != "gen")
        arguments = dict.fromkeys(replica.workers, (model, directory))
        await self._on_devices(f"saving model {model!r}", "save", arguments)

    async def close(self) -> None:
        """End the work, and what this run reserved or started. Safe to call twice."""
        actors, self._actors = self._actors, []
        await end_work(actors)
        if self._owns_processes and self._processes is not None:
            await self._processes.close()

    # ---------------------------------------------------------------------------- messages
    def _send(self, worker: int, method: str, *arguments: Any) -> Any:
        """Send one message; the result is a reference."""
        return getattr(self._actors[worker], method).remote(*arguments)

    async def _call(self, worker: int, method: str, *arguments: Any) -> Any:
        return await self._answer(worker, self._send(worker, method, *arguments))

    async def _on_devices(
        self, doing: str, method: str, arguments: Mapping[int, tuple[Any, ...]]
    ) -> list[Any]:
        """Send a message to several devices and wait for all; the first error ends the wait."""
        return await self._wait_all(doing, self._send_all(method, arguments))

    def _send_all(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        return {worker: self._send(worker, method, *given) for worker, given in arguments.items()}

    def _wait_all(self, doing: str, sent: Mapping[int, Any]) -> asyncio.Future[list[Any]]:
        return asyncio.gather(*(self._on_device(worker, doing, ref) for worker, ref in sent.items()))

    async def _on_device(self, worker: int, doing: str, reference: Any) -> Any:
        self._doing[worker].append(doing)
        try:
            return await self._answer(worker, reference)
        finally:
            self._doing[worker].remove(doing)

    async def _answer(self, worker: int, reference: Any) -> Any:
        """Wait for a result.

        Raises:
            HflowError: what the worker raised, or that it died.
        """
        try:
            return await reference
        except RayTaskError as error:
            if isinstance(error.cause, HflowError):
                raise error.cause from None
            raise
        except RayActorError as error:
            doing = self._died.setdefault(worker, (*self._doing[worker], "between two nodes")[0])
            reason = str(error).strip().splitlines()[-1]
            raise RunError(f"worker {worker} died while {doing}: {reason}") from None
