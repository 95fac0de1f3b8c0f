"""Messages to workers, and what the controller reports when a worker's process dies."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from worker_kit import setup_of

from hflow.base.errors import RunError, WorkerFailureError
from hflow.base.waiting import WaitFor, wait_silently
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.rows import Replica, WeightRoute
from hflow.runtime.execution.executor import _first_exception
from hflow.shapes.layout import Layout
from hflow.weights.checksum import MODULUS
from hflow.weights.loading import LoadedWeights
from hflow.weights.publisher import PublishReport
from hflow.workers.hangs.hang_detector import WorkerCall
from hflow.workers.hangs.stack_probe import StackSnapshot
from hflow.workers.interface import NodeTask, WeightsLoaded
from hflow.workers.messages import LANES, MESSAGES
from hflow.workers.ray.ray_actors import RayActors
from hflow.workers.ray.ray_weights import RayWeights, _weights_loaded
from hflow.workers.ray.ray_workers import RayWorkers, done_within
from hflow.workers.worker import Worker

TIMEOUT = 0.4
MISSING = (
    "running node 'learn', step 3: worker 1 did not join within 0.4 s: it is in g (x.py:2); "
    "worker 0 waits for it in barrier"
)


def test_every_message_has_a_receiver_and_a_lane() -> None:
    of_the_process = {"build", "place", "probe", "pull", "rendezvous", "set_peer"}
    assert all(hasattr(Worker, name) for name in MESSAGES if name not in of_the_process)
    assert {message.lane for message in MESSAGES.values()} == LANES.keys()
    assert all((message.lane == "device") == (message.activity is not None) for message in MESSAGES.values())


class DyingWorkers(RayWorkers):
    """Two workers; worker 0 waits for worker 1 in a collective, and dies."""

    def __init__(self) -> None:
        super().__init__(RayActors(ClusterSpec("cpu-1x2", "cpu", 1, 2, 1 << 30)))
        self._plan = SimpleNamespace(replicas=())
        self._timeout = TIMEOUT
        self._death_of_0 = asyncio.Event()

    def _send(self, worker: int, method: str, *arguments: Any) -> Awaitable[Any]:
        if method == "probe" and worker == 1:
            return _answer(StackSnapshot("running node 'learn', step 3", "g (x.py:2)", "", {"all": 4}))
        if method == "probe" and not self._death_of_0.is_set():
            return _answer(StackSnapshot("running node 'learn', step 3", "f (x.py:1)", "barrier", {"all": 5}))
        return self._until_death(worker)

    async def _until_death(self, worker: int) -> None:
        await (self._death_of_0 if worker == 0 else asyncio.Event()).wait()
        raise RayActorError()

    async def kill(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._death_of_0.set()


async def _answer(snapshot: StackSnapshot) -> StackSnapshot:
    return snapshot


@dataclass
class Messages:
    """What two workers that train, and the engine of a third, are sent for one update of weights."""

    fails: str = ""
    """The message that the engine answers with an error."""
    sent: list[tuple[str, int]] = field(default_factory=list)

    def send(self, worker: int, method: str, *arguments: Any) -> Any:
        self.sent.append((method, worker))
        report = PublishReport("m@gen", 3, 10, 0, 10, None, {2: 7 + worker}, 0.0, 1.0)
        return ("handles", report) if method == "publish" else LoadedWeights((20,), (0,), (15,))

    async def wait_all(self, call: WorkerCall, answers: dict[int, Any]) -> list[Any]:
        await asyncio.sleep(0)
        if self.fails and self.fails in call.activity:
            raise RunError("no")
        return list(answers.values())

    async def call(self, worker: int, method: str, *arguments: Any) -> None:
        self.sent.append((method, worker))

    def wake(self) -> WeightsLoaded:
        replicas = {
            "m@train": Replica("m@train", "m", "train", "torch", Layout.parse("d2"), ("a",), (0, 1), ()),
            "m@gen": Replica("m@gen", "m", "gen", "vllm", Layout.parse("d1"), ("b",), (2,), (2,)),
        }
        route = WeightRoute("m", "m@train", "m@gen", "pull", (), (), 20, 0, 0, "shared")
        plan: Any = SimpleNamespace(weights=(route,), replica=replicas.__getitem__)
        return asyncio.run(RayWeights(plan, self.send, self.wait_all, self.call).wake("m@gen", 3))


UPDATE = [
    *(("publish", 0), ("publish", 1), ("load_weights", 2)),
    *(("free_weights", 0), ("free_weights", 1)),
]


def test_published_weights_are_freed_before_an_engine_wakes() -> None:
    messages = Messages()
    assert messages.wake() == WeightsLoaded(20, (7 + 8,), (15,))
    assert messages.sent == [*UPDATE, ("wake", 2)]


def test_an_engine_that_could_not_load_does_not_wake() -> None:
    messages = Messages(fails="loading weights")
    with pytest.raises(RunError, match="no"):
        messages.wake()
    assert messages.sent == UPDATE


class StartedActors(RayActors):
    """Processes that Ray has started."""

    def start(
        self,
        report_progress: Callable[[str], None] = lambda line: None,
        wait_for: WaitFor = wait_silently,
    ) -> None:
        """They run."""

    def actors(self, number: int) -> list[Any]:
        return [None] * number


class StoppedWorkers(RayWorkers):
    """Workers whose processes were stopped before they answer anything."""

    def _send(self, worker: int, method: str, *arguments: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().create_future()


def test_workers_that_are_stopped_while_they_start_have_failed() -> None:
    setup = dataclasses.replace(setup_of(), collective_timeout=TIMEOUT)
    workers = StoppedWorkers(StartedActors(setup.plan.cluster))
    with pytest.raises(WorkerFailureError, match=r"^starting: worker 0 did not join within 0\.4 s: "):
        asyncio.run(workers.start(setup))


def errors(*names: str) -> list[str]:
    """Return what these calls raise when worker 0 dies after it has waited too long."""

    async def call() -> list[str]:
        workers = DyingWorkers()
        tasks = {worker: NodeTask("learn", 2, ()) for worker in (0, 1)}
        calls = {
            "run": lambda: workers._call_devices("run", {w: ({w: task},) for w, task in tasks.items()}),
            "pull": lambda: workers._call_devices("pull", {0: ({},)}),
            "poll": lambda: workers.poll(0),
            "compute": lambda: workers.compute(0, ()),
        }
        async with asyncio.timeout(5):
            results = await asyncio.gather(
                *(calls[name]() for name in names), workers.kill(1.5 * TIMEOUT), return_exceptions=True
            )
        assert all(isinstance(result, RunError) for result in results[:-1]), results
        return [str(result) for result in results[:-1]]

    return asyncio.run(call())


def test_all_messages_to_a_worker_that_died_waiting_name_the_missing_rank() -> None:
    for error in errors("run", "pull", "poll", "compute"):
        assert error == MISSING


def test_the_death_of_an_idle_worker_is_reported() -> None:
    for error in errors("poll", "compute"):
        assert error.startswith("worker 0 died while idle")


class SilentWorkers(RayWorkers):
    """Two workers; worker 1 answers two probes and is stopped then."""

    def __init__(self) -> None:
        super().__init__(RayActors(ClusterSpec("cpu-1x2", "cpu", 1, 2, 1 << 30)))
        self._plan = SimpleNamespace(replicas=())
        self._actors = [None, None]
        self._hang_seconds = 0.2
        self.num_probes = [0, 0]
        self.killed: list[int] = []

    def _send(self, worker: int, method: str, *arguments: Any) -> Awaitable[Any]:
        assert method == "probe"
        self.num_probes[worker] += 1
        is_stopped = worker == 1 and self.num_probes[worker] > 2
        return asyncio.Future() if is_stopped else _answer(StackSnapshot())

    def _kill(self, worker: int) -> None:
        self.killed.append(worker)


def test_a_worker_that_does_not_answer_is_killed_and_named() -> None:
    workers = SilentWorkers()
    with pytest.RaisesGroup(
        pytest.RaisesExc(WorkerFailureError, match=r"worker 1 has not answered for 0.2 s")
    ):
        asyncio.run(asyncio.wait_for(workers.watch(), 20))
    assert workers.killed == [1]
    assert workers.num_probes[0] > 2


def test_time_in_which_the_controller_is_stopped_does_not_count() -> None:
    async def answer_after_a_stop() -> bool:
        answer: asyncio.Future[None] = asyncio.Future()
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, time.sleep, 1.5)  # nothing of this process runs meanwhile
        loop.call_later(1.7, answer.set_result, None)
        return await done_within(answer, 1.2)

    assert asyncio.run(answer_after_a_stop())


def test_what_an_engine_was_sent_is_what_senders_and_its_own_worker_count() -> None:
    engine = Replica("actor@gen", "actor", "gen", "embedded", Layout(1), ("gen",), (4, 5), (4, 5))
    reports = {worker: PublishReport("actor@gen", 1, 8, 0, 8, None, {4: 10}, 0.0, 1.0) for worker in (0, 1)}
    updates = [LoadedWeights((8,), (MODULUS - 1,), (19,)), LoadedWeights((0,), (7,), (7,))]
    loaded = _weights_loaded(engine, updates, reports)
    assert loaded == WeightsLoaded(8, (19, 7), (19, 7))


def test_what_ray_lost_on_a_worker_is_a_failure_that_a_restart_fixes() -> None:
    """As when the worker that owned an object has ended, and another takes it from the object store."""

    async def lost() -> None:
        raise RayTaskError("load_weights", "", ObjectLostError("ab" * 14, "", ""))

    with pytest.raises(WorkerFailureError, match=r"^Ray failed: Failed to retrieve object"):
        asyncio.run(SilentWorkers()._answer(0, lost()))


def test_a_failure_that_a_restart_fixes_is_raised_before_what_follows_from_it() -> None:
    followed, failure = RunError("worker 0: the weights are gone"), WorkerFailureError("worker 1 died")
    assert _first_exception(ExceptionGroup("", [followed, ExceptionGroup("", [failure])])) is failure
    assert _first_exception(ExceptionGroup("", [followed])) is followed
