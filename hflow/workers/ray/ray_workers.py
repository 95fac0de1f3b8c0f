"""The workers of a run as Ray actors, one per device.

Samples and weights go from actor to actor. The controller's process handles ids, numbers and references only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from hflow.errors import HflowError, RunError, WorkerFailureError
from hflow.planner.backends import engine_kind
from hflow.planner.data.redistribute import Move
from hflow.planner.ir import Plan, Replica
from hflow.planner.routing import tensor_ranks
from hflow.recipe_files import pack
from hflow.workers.hangs.hang_detector import HangDetector, WorkerDiedError
from hflow.workers.hangs.hang_report import WorkerCall
from hflow.workers.hangs.stack_probe import StackSnapshot
from hflow.workers.interface import (
    NodeResult,
    NodeTask,
    Span,
    WeightsLoaded,
    Workers,
    WorkerSetup,
    build_phase,
)
from hflow.workers.messages import activity_of
from hflow.workers.pickling import pickle_with_bodies
from hflow.workers.process_groups import ProcessRank
from hflow.workers.process_setup import device_environment
from hflow.workers.ray.ray_actors import RayActors, close_workers
from hflow.workers.ray.ray_weights import RayWeights
from hflow.workers.storage.sample_transfer import pulls_of

PROBE_SECONDS = 10.0
"""Longest wait for a worker's answer to a probe."""


def check_engine_machines(plan: Plan, machines: Sequence[str]) -> None:
    """Check that the tensor ranks of each engine in a process of its own are on one machine.

    Args:
        plan: with the engines.
        machines: worker -> its machine, which Ray has chosen.

    Raises:
        RunError: naming an engine whose ranks are apart.
    """
    for replica in plan.replicas:
        if replica.role == "gen" and engine_kind(replica.backend).has_own_process:
            for head in replica.heads:
                ranks = tensor_ranks(replica, head)
                if len({machines[worker] for worker in ranks}) > 1:
                    raise RunError(
                        f"Ray placed workers {', '.join(map(str, ranks))} on several machines, but they are "
                        f"the tensor ranks of one engine of {replica.name}; use machines with as many free "
                        f"devices as the cluster names, or set a smaller models.{replica.model}.gen.layout"
                    )


@dataclass(eq=False)
class _PendingCall:
    """A call of several workers that has not ended."""

    call: WorkerCall
    unanswered: set[int]
    task: asyncio.Task[list[Any]] | None = None
    """Collects the answers; fails with the error that explains the others."""


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
            processes: worker processes that several runs use in turn, and that this run does not end; None:
                it starts and ends its own.
        """
        self._actors: list[Any] = []
        self._processes = processes
        self._owns_processes = processes is None
        self._pending: list[_PendingCall] = []
        """In the order in which they were sent, which is the order in which devices work on them."""
        self._deaths: dict[int, _Death] = {}
        self._unresponsive: set[int] = set()
        """Workers that did not answer the last probe."""
        self._weights: RayWeights
        self._timeout: float

    async def start(
        self, setup: WorkerSetup, report_progress: Callable[[str], None] = lambda line: None
    ) -> None:
        """Start all actors at the same time, then build process groups and models in them."""
        self._plan, self._timeout = setup.plan, setup.collective_timeout
        self._weights = RayWeights(setup.plan, self._send, self._wait_all, self._call)
        workers = range(setup.plan.cluster.num_devices)
        report_progress(f"starting Ray and {len(workers)} workers")
        if self._processes is None:
            environments = [device_environment(setup.plan, worker) for worker in workers]
            self._processes = RayActors(setup.plan.cluster, environments)
        self._processes.start()
        self._actors = self._processes.actors(len(workers))
        bodies = [program.body for program in setup.programs.values()]
        pickled = ray.put(pickle_with_bodies(setup, bodies))
        # Wait until every process has started, so that none times out in `build` while another imports torch.
        places = await asyncio.gather(*(self._call(worker, "place") for worker in workers))
        machines = [machine for machine, _ in places]
        check_engine_machines(setup.plan, machines)
        here = ray.get_runtime_context().get_node_id()
        is_spread = any(machine != here for machine in machines)
        files = ray.put(pack(setup.recipe_directory)) if is_spread else None
        sent = [None if machine == here else files for machine in machines]
        report_progress(build_phase(setup.plan))
        devices = [names[0] for _, names in places if names]
        address = await self._call(0, "rendezvous") if len(workers) > 1 else ""
        ranks = [ProcessRank(worker, len(workers), address) if address else None for worker in workers]
        arguments = {
            worker: (setup.recipe_directory, sent[worker], pickled, ranks[worker], self._actors, devices)
            for worker in workers
        }
        await self._call_devices("build", arguments)

    async def transfer(self, moves: Sequence[Move]) -> int:
        """Let destinations pull from sources, after what their devices were sent before."""
        if not moves:
            return 0
        pulls = pulls_of(moves)
        sources = {source for requests in pulls.values() for source in requests}
        arguments = {destination: (requests,) for destination, requests in pulls.items()}
        return sum(await self._call_devices("pull", arguments, others=sources))

    async def run(self, tasks: Mapping[int, NodeTask]) -> list[NodeResult]:
        """Run a batch node on all its workers at once."""
        replicas = self._plan.placement(next(iter(tasks.values())).node).replicas
        replica = self._plan.replica(replicas[0]) if replicas else None
        arguments = {worker: ({worker: task},) for worker, task in tasks.items()}
        return [result for (result,) in await self._call_devices("run", arguments, replica)]

    async def publish(self, replica: str, version: int) -> tuple[tuple[int, Span], ...]:
        """Let senders publish weights for a generation replica."""
        return await self._weights.publish(replica, version)

    async def wake(self, replica: str, version: int) -> WeightsLoaded:
        """Bring engines to a version, with weights that are published now unless they have been."""
        return await self._weights.wake(replica, version)

    async def close(self) -> None:
        """End the work, and free what this run reserved or started. Safe to call twice."""
        actors, self._actors = self._actors, []
        await close_workers(
            [actor for worker, actor in enumerate(actors) if worker not in self._unresponsive]
        )
        if self._owns_processes and self._processes is not None:
            await self._processes.close()

    def _send(self, worker: int, method: str, *arguments: Any) -> Any:
        """Send one message; returns a reference to its answer."""
        return getattr(self._actors[worker], method).remote(*arguments)

    async def _call(self, worker: int, method: str, *arguments: Any) -> Any:
        """Send one message and wait for its answer.

        Raises:
            HflowError: what the worker raised; of a dead worker, what explains its death.
        """
        return await self._answer_or_cause(worker, self._send(worker, method, *arguments), None)

    async def _call_replica(self, replica: Replica, method: str, *arguments: Any) -> None:
        """Send a message to the devices of a replica's workers and wait for them.

        Only the heads of a generation replica have an engine.
        """
        workers = replica.heads if replica.role == "gen" else replica.workers
        await self._call_devices(method, dict.fromkeys(workers, arguments), replica)

    async def _call_devices(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        replica: Replica | None = None,
        others: Iterable[int] = (),
    ) -> list[Any]:
        """Send a message to the devices of several workers and return all answers.

        Args:
            method: the method of the worker process.
            arguments: worker -> arguments.
            replica: the replica whose ranks these workers are, if it is one; all its ranks take part.
            others: workers that take part without receiving the message.
        """
        answers = {worker: self._send(worker, method, *given) for worker, given in arguments.items()}
        workers = {*arguments, *others, *(replica.workers if replica else ())}
        activity = activity_of(method, *next(iter(arguments.values())))
        return await self._wait_all(WorkerCall(activity, tuple(sorted(workers)), replica), answers)

    async def _wait_all(self, call: WorkerCall, references: Mapping[int, Any]) -> list[Any]:
        """Wait for the answers to a call of several devices.

        Raises:
            HflowError: the error that explains the others, see `HangDetector`.
        """
        pending = _PendingCall(call, set(references))
        answers = {worker: self._device_answer(worker, pending, ref) for worker, ref in references.items()}
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
            self._unresponsive.add(worker)
            return None
        self._unresponsive.discard(worker)
        return snapshot

    async def _device_answer(self, worker: int, pending: _PendingCall, reference: Any) -> Any:
        try:
            return await self._answer_or_cause(worker, reference, pending)
        finally:
            pending.unanswered.discard(worker)

    async def _answer_or_cause(self, worker: int, reference: Any, pending: _PendingCall | None) -> Any:
        """Wait for a worker's answer. If the worker has died, raise the error that explains its death.

        A process may die because it waited too long for another rank. So the call that its device was working
        on explains the death: its hang detector knows which rank was missing. Everything else that fails
        because of the death waits for this call and raises the same error. So it does not matter which of
        them ends the run.

        Args:
            worker: that answers.
            reference: to its answer.
            pending: the call that it answers; None: the message is not for its device.

        Raises:
            HflowError: what the worker raised, or what explains its death.
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
        """Wait for a worker's answer.

        Raises:
            HflowError: what the worker raised.
            WorkerDiedError: when its process has ended.
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
        except RayError as error:
            raise WorkerFailureError(f"Ray failed: {str(error).strip().splitlines()[0]}") from None

    def _death(self, worker: int, reason: str) -> _Death:
        pending = next((pending for pending in self._pending if worker in pending.unanswered), None)
        activity = self._idle_activity(worker) if pending is None else pending.call.activity
        return _Death(WorkerDiedError(f"worker {worker} died while {activity}: {reason}"), pending)

    def _idle_activity(self, worker: int) -> str:
        """Return what a worker does while no call runs on its device."""
        has_engine = any(r.role == "gen" and worker in r.workers for r in self._plan.replicas)
        return "idle or generating" if has_engine else "idle"
