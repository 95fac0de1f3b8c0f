"""`RayWorkers`: one Ray actor a device. The controller sends and receives names and numbers.

What moves between stores, and weights on their way to engines, goes from actor to actor: this
process handles ids and references only (contract 7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from hflow.errors import HflowError
from hflow.planner.data.redistribute import Move
from hflow.planner.ir import Plan, Replica
from hflow.workers.hangs.hang_detector import HangDetector, WorkerDiedError
from hflow.workers.hangs.hang_report import WorkerCall
from hflow.workers.hangs.stack_probe import StackSnapshot
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
from hflow.workers.pickling import ship
from hflow.workers.process_groups import Membership
from hflow.workers.process_setup import environment
from hflow.workers.ray.ray_actors import RayActors, end_work
from hflow.workers.ray.ray_weights import RayWeights
from hflow.workers.weights.transfer import by_ends

PROBE_SECONDS = 10.0
"""Longest wait for a worker to say where it stands."""


@dataclass(eq=False)
class _PendingCall:
    """A call of several workers that has not ended."""

    call: WorkerCall
    unanswered: set[int]
    task: asyncio.Task[list[Any]] | None = None
    """Collects the answers; fails with the error that explains those of all workers."""


@dataclass(frozen=True)
class _Death:
    """The end of a worker's process."""

    error: WorkerDiedError
    pending: _PendingCall | None
    """The call that its device was working on; None: it was idle."""


class RayWorkers(Workers):
    """The workers of one run. Its methods are called from one event loop.

    Messages to a worker's device are sent before a method awaits anything, so that all workers
    see them in the order of the calls.
    """

    def __init__(self, processes: RayActors | None = None) -> None:
        """Prepare a run.

        Args:
            processes: those of several runs, which are left as they are; None: this run starts its own.
        """
        self._actors: list[Any] = []
        self._processes = processes
        self._owns_processes = processes is None
        self._plan: Plan
        self._pending: list[_PendingCall] = []
        """In the order in which they were sent, which is that in which devices work on them."""
        self._deaths: dict[int, _Death] = {}
        self._silent: set[int] = set()
        """Workers that did not answer a probe."""
        self._weights: RayWeights
        self._timeout: float

    async def start(self, setup: WorkerSetup) -> None:
        """Start actors at the same time, then build worlds and models in them."""
        self._plan, self._timeout = setup.plan, setup.collective_timeout
        self._weights = RayWeights(setup.plan, self._send, self._wait_all)
        everyone = range(setup.plan.cluster.num_devices)
        if self._processes is None:
            environments = [environment(setup.plan, worker) for worker in everyone]
            self._processes = RayActors(setup.plan.cluster, environments)
        self._processes.start()
        self._actors = self._processes.actors(len(everyone))
        bodies = [program.body for program in setup.programs.values()]
        shared = ray.put(ship(setup, bodies))
        # Who starts first must not lose patience with who starts last.
        await asyncio.gather(*(self._call(worker, "probe") for worker in everyone))
        address = await self._call(0, "rendezvous") if len(everyone) > 1 else ""
        members = [Membership(worker, len(everyone), address) if address else None for worker in everyone]
        await self._on_devices(
            self._together("building its models", everyone),
            "build",
            {worker: (shared, members[worker], self._actors) for worker in everyone},
        )

    async def open_groups(self, worker: int, orders: Sequence[GroupOrder]) -> None:
        """Start sources."""
        await self._call(worker, "open_groups", orders)

    async def detach_groups(self, worker: int, stream: str, groups: Sequence[int]) -> list[GroupOrder]:
        """Stop groups that another worker goes on with; their journals stay in the object store."""
        orders: list[GroupOrder] = await self._call(worker, "detach_groups", stream, groups)
        return orders

    async def compute(self, worker: int, orders: Sequence[ComputeOrder]) -> None:
        """Queue sample- and group-level bodies."""
        await self._call(worker, "compute", orders)

    async def poll(self, worker: int) -> Report:
        """Wait for events."""
        report: Report = await self._call(worker, "poll")
        return report

    async def transfer(self, moves: Sequence[Move]) -> int:
        """Let destinations pull from sources, behind what their devices were asked to do before."""
        pulls = by_ends(moves)
        sent = self._send_all("pull", {dst: (wanted,) for dst, wanted in pulls.items()})
        ends = {*pulls, *(source for wanted in pulls.values() for source in wanted)}
        return sum(await self._wait_all(self._together("pulling samples", ends), sent))

    async def run(self, tasks: Mapping[int, NodeTask]) -> list[NodeResult]:
        """Run a batch node on all its workers at once; results in the order of `tasks`."""
        first = next(iter(tasks.values()))
        replicas = self._plan.placement(first.node).replicas
        call = self._together(
            f"running node {first.node!r} of step {first.step}",
            tasks,
            self._plan.replica(replicas[0]) if replicas else None,
            title=f"node {first.node!r}, step {first.step}",
        )
        return await self._on_devices(call, "run", {worker: (task,) for worker, task in tasks.items()})

    async def publish(self, replica: str, version: int) -> tuple[tuple[int, Span], ...]:
        """Let sources publish weights for a generation replica."""
        return await self._weights.publish(replica, version)

    async def wake(self, replica: str, version: int) -> WeightsLoaded:
        """Bring engines to a version, by what sources published or publish now."""
        return await self._weights.wake(replica, version)

    async def sleep(self, replica: str) -> None:
        """Interrupt engines."""
        engine = self._plan.replica(replica)
        call = self._together(f"interrupting {replica}", engine.workers, engine)
        await self._on_devices(call, "sleep", dict.fromkeys(engine.workers, (replica,)))

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
        call = self._together(f"saving model {model!r}", replica.workers, replica)
        await self._on_devices(call, "save", arguments)

    async def close(self) -> None:
        """End the work, and what this run reserved or started. Safe to call twice."""
        actors, self._actors = self._actors, []
        await end_work([actor for worker, actor in enumerate(actors) if worker not in self._silent])
        if self._owns_processes and self._processes is not None:
            await self._processes.close()

    # ---------------------------------------------------------------------------- messages
    def _send(self, worker: int, method: str, *arguments: Any) -> Any:
        """Send one message; the result is a reference."""
        return getattr(self._actors[worker], method).remote(*arguments)

    async def _call(self, worker: int, method: str, *arguments: Any) -> Any:
        """Send one message and wait for its answer.

        Raises:
            HflowError: what the worker raised; of a dead worker, what explains its death.
        """
        return await self._answer_or_cause(worker, self._send(worker, method, *arguments), None)

    async def _on_devices(
        self, call: WorkerCall, method: str, arguments: Mapping[int, tuple[Any, ...]]
    ) -> list[Any]:
        """Send a message to several devices and wait for all; an error ends the wait."""
        return await self._wait_all(call, self._send_all(method, arguments))

    def _send_all(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        return {worker: self._send(worker, method, *given) for worker, given in arguments.items()}

    def _together(
        self, doing: str, workers: Iterable[int], replica: Replica | None = None, title: str = ""
    ) -> WorkerCall:
        """What these workers, and the others of the replica, do together."""
        everyone = {*workers, *(replica.workers if replica else ())}
        return WorkerCall(title or doing, doing, tuple(sorted(everyone)), replica)

    async def _wait_all(self, call: WorkerCall, sent: Mapping[int, Any]) -> list[Any]:
        pending = _PendingCall(call, set(sent))
        answers = {worker: self._on_device(worker, pending, ref) for worker, ref in sent.items()}
        detector = HangDetector(call, self._probe, self._timeout)
        pending.task = asyncio.ensure_future(detector.collect(answers))
        self._pending.append(pending)
        try:
            return await pending.task
        finally:
            self._pending.remove(pending)

    async def _probe(self, worker: int) -> StackSnapshot | None:
        """Return where a worker's device thread is; None: the worker does not answer."""
        seconds = min(PROBE_SECONDS, self._timeout)
        try:
            snapshot: StackSnapshot = await asyncio.wait_for(
                self._answer(worker, self._send(worker, "probe")), seconds
            )
        except TimeoutError:
            self._silent.add(worker)
            return None
        self._silent.discard(worker)
        return snapshot

    async def _on_device(self, worker: int, pending: _PendingCall, reference: Any) -> Any:
        try:
            return await self._answer_or_cause(worker, reference, pending)
        finally:
            pending.unanswered.discard(worker)

    async def _answer_or_cause(self, worker: int, reference: Any, pending: _PendingCall | None) -> Any:
        """Wait for a worker's answer to a call (None: to a message that is not for its device).

        A process may die because it waited too long for another rank, so a death is explained by the call
        that its device was working on: only that call's hang detector knows which rank was missing. All else
        that the death makes fail waits for that call and raises the same error, so that it does not matter
        which of them ends the run.
        """
        try:
            return await self._answer(worker, reference)
        except WorkerDiedError:
            death = self._deaths[worker]
            if death.pending is None or death.pending is pending or death.pending.task is None:
                raise
            await asyncio.wait([death.pending.task])
            cause = None if death.pending.task.cancelled() else death.pending.task.exception()
            raise (cause or death.error) from None

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
            if worker not in self._deaths:
                self._deaths[worker] = self._death(worker, str(error).strip().splitlines()[-1])
            raise self._deaths[worker].error from None

    def _death(self, worker: int, reason: str) -> _Death:
        pending = next((pending for pending in self._pending if worker in pending.unanswered), None)
        activity = "idle" if pending is None else pending.call.doing
        return _Death(WorkerDiedError(f"worker {worker} died while {activity}: {reason}"), pending)
