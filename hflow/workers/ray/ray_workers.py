"""The workers of a run as Ray actors, one per device.

Samples and weights go from actor to actor. The controller's process handles ids, numbers and references only.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from typing_extensions import override

from hflow.base.errors import HflowError, WorkerFailureError
from hflow.base.recipe_files import pack
from hflow.base.text import pluralize
from hflow.base.waiting import WaitFor, wait_silently
from hflow.data_plane.redistribute import Moves
from hflow.planner.plan.routing import replaceable_workers
from hflow.planner.plan.rows import Replica
from hflow.processes.pickling import pickle_with_bodies
from hflow.workers.hangs.hang_detector import HangDetector, WorkerCall, WorkerDiedError
from hflow.workers.hangs.stack_probe import StackSnapshot
from hflow.workers.interface import (
    NodeResult,
    NodeTask,
    Span,
    WeightsLoaded,
    Workers,
    WorkerSetup,
    build_phase,
    replicas_text,
)
from hflow.workers.messages import MESSAGES, activity_of
from hflow.workers.process_groups import ProcessRank, collective_workers
from hflow.workers.ray.ray_actors import RayActors, close_workers
from hflow.workers.ray.ray_weights import RayWeights
from hflow.workers.real_devices import check_devices, package_versions

PROBE_SECONDS = 10.0
"""Longest wait for a worker's answer to a probe after a failure."""
PROBES_PER_LIMIT = 4
"""How often a worker is probed in the time after which it counts as failed."""
TICK_SECONDS = 1.0
"""The most that one wait counts towards that time, however long it was: the controller may be stopped too."""


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


@dataclass(frozen=True)
class _BuildArguments:
    """What worker processes are built from."""

    recipe_directory: str
    files: Any
    """The recipe's packed files, for other machines, or a reference to them; None if there are none."""
    pickled: Any
    """The setup, or a reference to it."""
    actors: list[Any]
    devices: list[str]
    """The CUDA device of each worker, as on its machine; empty on CPUs."""

    def in_object_store(self) -> _BuildArguments:
        """Return the same with references to objects that are sent to each machine once.

        Do not keep them while the run works: if the raylet of this machine ends, Ray looks for the objects of
        this process in the store that has ended too, and ends the process.
        """
        files = None if self.files is None else ray.put(self.files)
        return replace(self, files=files, pickled=ray.put(self.pickled))

    def of(self, machine: str, rank: ProcessRank | None) -> tuple[Any, ...]:
        """Return the arguments of `WorkerProcess.build` for a process."""
        files = None if machine == _this_machine() else self.files
        return self.recipe_directory, files, self.pickled, rank, self.actors, self.devices


def _this_machine() -> str:
    machine: str = ray.get_runtime_context().get_node_id()
    return machine


class RayWorkers(Workers):
    """The workers of one run. Its methods are called from one event loop.

    Messages to a worker's device are sent before a method awaits anything, so that all workers
    see them in the order of the calls.
    """

    def __init__(self, processes: RayActors) -> None:
        """Prepare a run. Processes are started unless they have been, and ended by `close` unless shared."""
        self._actors: list[Any] = []
        self._processes = processes
        self._pending: list[_PendingCall] = []
        """In the order in which they were sent, which is the order in which devices work on them."""
        self._deaths: dict[int, _Death] = {}
        self._unresponsive: set[int] = set()
        """Workers that did not answer the last probe."""
        self._replaced: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        """Worker -> set when another process has taken its place, if it may be replaced."""
        self._rebuilding: set[int] = set()
        """Workers that are being replaced."""
        self._build: _BuildArguments
        self._weights: RayWeights
        self._timeout: float
        self._hang_seconds: float | None = None

    @override
    async def start(
        self,
        setup: WorkerSetup,
        report_progress: Callable[[str], None] = lambda line: None,
        wait_for: WaitFor = wait_silently,
    ) -> None:
        self._plan, self._timeout = setup.plan, setup.collective_timeout
        self._hang_seconds = setup.hang_seconds
        self.replaceable = replaceable_workers(setup.plan) if setup.sample_log_directory else {}
        self._weights = RayWeights(setup.plan, self._send, self._wait_all, self._call)
        workers = range(setup.plan.cluster.num_devices)
        self._processes.start(report_progress, wait_for)
        self._actors = self._processes.actors(len(workers))
        bodies = [program.body for program in setup.programs.values()]
        bodies += [function for settings in setup.datasets.values() for function in settings.functions]
        pickled = pickle_with_bodies(setup, bodies)
        # Wait until every process has started, so that none times out in `build` while another imports torch.
        with wait_for(f"{pluralize(len(workers), 'worker')} to start"):
            places = await self._call_devices("place", dict.fromkeys(workers, ()))
        machines = [machine for machine, _ in places]
        found = [devices for _, devices in places]
        check_devices(setup.plan, found, package_versions())
        is_spread = any(machine != _this_machine() for machine in machines)
        files = pack(setup.recipe_directory) if is_spread else None
        report_progress(build_phase(setup.plan))
        devices = [process.names[0] for process in found if process.names]
        self._build = _BuildArguments(setup.recipe_directory, files, pickled, self._actors, devices)
        members = collective_workers(setup.plan.replicas)
        (address,) = await self._call_devices("rendezvous", {members[0]: ()}) if len(members) > 1 else [""]
        ranks = [ProcessRank(w, members, address) if address and w in members else None for w in workers]
        build = self._build.in_object_store()
        arguments = {w: build.of(machines[w], ranks[w]) for w in workers}
        with wait_for(self._unbuilt):
            await self._call_devices("build", arguments)

    def _unbuilt(self) -> str:
        """Return the replicas of the workers that have not answered."""
        unanswered = {worker for pending in self._pending for worker in tuple(pending.unanswered)}
        return replicas_text(self._plan, unanswered) or "workers"

    @override
    async def transfer(self, moves: Moves) -> int:
        """Let destinations pull from sources, after what their devices were sent before."""
        sources = moves.sources
        arguments = {destination: (pulled,) for destination, pulled in moves.by_destination().items()}
        if not arguments:
            return 0
        while True:
            involved = {*sources, *arguments} & self.replaceable.keys()
            replaced = {worker: self._replaced[worker] for worker in involved}
            for worker in involved & self._rebuilding:
                await replaced[worker].wait()
            try:
                return sum(await self._call_devices("pull", arguments, others=sources))
            except WorkerFailureError:
                lost = [w for w in involved if replaced[w].is_set() or await self._is_lost(w)]
                if not lost:
                    raise
                await asyncio.gather(*(replaced[worker].wait() for worker in lost))

    @override
    async def run(self, tasks: Mapping[int, NodeTask]) -> list[NodeResult]:
        replicas = self._plan.placement(next(iter(tasks.values())).node).replicas
        replica = self._plan.replica(replicas[0]) if replicas else None
        arguments = {worker: ({worker: task},) for worker, task in tasks.items()}
        return [result for (result,) in await self._call_devices("run", arguments, replica)]

    @override
    async def publish(self, replica: str, version: int) -> tuple[tuple[int, Span], ...]:
        return await self._weights.publish(replica, version)

    @override
    async def wake(self, replica: str, version: int) -> WeightsLoaded:
        return await self._weights.wake(replica, version)

    @override
    def forget_weights(self, replica: str) -> None:
        self._weights.forget(replica)

    @override
    async def watch(self) -> None:
        if self._hang_seconds is not None:
            async with asyncio.TaskGroup() as tasks:
                for worker in range(len(self._actors)):
                    tasks.create_task(self._watch(worker, self._hang_seconds))

    async def _watch(self, worker: int, seconds: float) -> NoReturn:
        """Probe a worker until it does not answer.

        Raises:
            WorkerFailureError: when it has not answered for so many seconds; it is killed then.
        """
        while True:
            replaced = self._replaced[worker]
            if worker in self._rebuilding:
                await replaced.wait()
                continue
            answer = asyncio.ensure_future(self._call_once(worker, "probe"))
            try:
                if not await done_within(answer, seconds):
                    self._fail(
                        worker,
                        f"has not answered for {seconds:g} s while {self._activity(worker)}: its process is "
                        "stopped, or its interpreter is blocked. If it was busy, raise faults.hang_seconds",
                    )
                    self._unresponsive.add(worker)
                    self._kill(worker)
                    raise self._deaths[worker].error
                await answer
            except WorkerDiedError:
                if worker not in self.replaceable:
                    raise
                await replaced.wait()
            finally:
                answer.cancel()
            await asyncio.sleep(seconds / PROBES_PER_LIMIT)

    @override
    async def replace(self, worker: int) -> Mapping[str, Sequence[int]]:
        self._rebuilding.add(worker)
        try:
            actor = self._actors[worker] = self._processes.replace(worker)
        except RayError as error:
            raise _ray_failure(error) from None
        self._deaths.pop(worker, None)
        self._unresponsive.discard(worker)
        ((machine, _),) = await self._call_devices("place", {worker: ()})
        await self._call_devices("build", {worker: self._build.of(machine, None)})
        restored: Mapping[str, Sequence[int]] = await self._call_once(worker, "restore_log")
        others = (other for other in range(len(self._actors)) if other != worker)
        await asyncio.gather(*(self._call_once(other, "set_peer", worker, actor) for other in others))
        self._rebuilding.discard(worker)
        self._replaced.pop(worker, asyncio.Event()).set()
        return restored

    async def _is_lost(self, worker: int) -> bool:
        """Return whether a worker's process has ended, once it answers or has ended."""
        if worker in self._rebuilding:
            return True
        try:
            await self._call_once(worker, "probe")
        except WorkerDiedError:
            return True
        return False

    def _kill(self, worker: int) -> None:
        """Kill a worker's process."""
        ray.kill(self._actors[worker])

    @override
    async def close(self) -> None:
        actors, self._actors = self._actors, []
        await close_workers(
            [actor for worker, actor in enumerate(actors) if worker not in self._unresponsive]
        )
        if not self._processes.is_shared:
            await self._processes.close()

    def _send(self, worker: int, method: str, *arguments: Any) -> Any:
        """Send one message; returns a reference to its answer."""
        return getattr(self._actors[worker], method).remote(*arguments)

    @override
    async def _call(self, worker: int, method: str, *arguments: Any) -> Any:
        """Send one message and wait for its answer. If the worker dies and is replaced, send it again.

        The answer is None if the message is not sent again (`Message.is_repeated`).

        Raises:
            HflowError: what the worker raised; of a dead worker, what explains its death.
        """
        while True:
            replaced = self._replaced[worker]
            try:
                if worker not in self._rebuilding:
                    return await self._call_once(worker, method, *arguments)
            except WorkerDiedError:
                if worker not in self.replaceable or method == "poll":
                    raise
            await replaced.wait()
            if not MESSAGES[method].is_repeated:
                return None

    async def _call_once(self, worker: int, method: str, *arguments: Any) -> Any:
        """Send one message and wait for its answer.

        Raises:
            HflowError: what the worker raised; of a dead worker, what explains its death.
        """
        return await self._answer_or_cause(worker, self._send(worker, method, *arguments), None)

    @override
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

        All ranks of a replica take part, and `others` without receiving the message.
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
        """Return the place of a worker's device thread; None: the worker does not answer."""
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

        `pending` is the call that it answers; None: the message is not for its device.

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
            if isinstance(error.cause, RayError):  # such as an object whose owner has ended
                raise _ray_failure(error.cause) from None
            raise
        except RayActorError as error:
            if worker not in self._deaths:
                reason = str(error).strip().splitlines()[-1].partition(" Some common causes")[0]
                self._fail(worker, f"died while {self._activity(worker)}: {reason}")
            raise self._deaths[worker].error from None
        except RayError as error:
            raise _ray_failure(error) from None

    def _fail(self, worker: int, what: str) -> None:
        """Note that a worker has failed, as in `died while idle`. Messages to it raise this from now on."""
        error = WorkerDiedError(f"worker {worker} {what}")
        self._deaths[worker] = _Death(error, self._pending_call(worker))

    def _pending_call(self, worker: int) -> _PendingCall | None:
        """Return the call that a worker's device is working on."""
        return next((pending for pending in self._pending if worker in pending.unanswered), None)

    def _activity(self, worker: int) -> str:
        """Return a worker's activity, as in `running node 'actor_train', step 3`."""
        if (pending := self._pending_call(worker)) is not None:
            return pending.call.activity
        has_engine = any(r.role == "gen" and worker in r.workers for r in self._plan.replicas)
        return "idle or generating" if has_engine else "idle"


def _ray_failure(error: RayError) -> WorkerFailureError:
    return WorkerFailureError(f"Ray failed: {str(error).strip().splitlines()[0]}")


async def done_within(answer: asyncio.Future[Any], seconds: float) -> bool:
    """Wait for an answer, and return whether it came in time.

    Only time in which this process runs counts: while it is stopped itself, or too busy, it could not have
    noticed an answer.
    """
    waited = 0.0
    while not answer.done() and waited < seconds:
        start, limit = time.monotonic(), min(TICK_SECONDS, seconds / 4, seconds - waited)
        await asyncio.wait((answer,), timeout=limit)
        waited += min(limit, time.monotonic() - start)
    return answer.done()
