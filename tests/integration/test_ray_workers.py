"""Workers as Ray actors: real processes, real collectives, real moves between stores."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
import ray
import worker_kit as kit

from hflow.base.errors import RunError
from hflow.data.batches.batch import Batch, Column
from hflow.data_plane.redistribute import Move, Moves
from hflow.launch.running.worker_setup import make_processes
from hflow.types import Unit
from hflow.types.engine import SleepLevel
from hflow.workers.interface import Failed, SampleReady, WorkerSetup
from hflow.workers.ray import ray_actors
from hflow.workers.ray.ray_workers import RayWorkers

pytestmark = pytest.mark.ray

T = TypeVar("T")
GEN = "actor_gen"
NUM_BYTES = 64 << 20


class MeasuredWorkers(RayWorkers):
    """Counts the bytes of all that this process sends and of all answers that it reads."""

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(make_processes(setup.plan))
        self.num_bytes = 0

    def _send(self, worker: int, method: str, *arguments: Any) -> Any:
        plain = [0 if isinstance(one, ray.ObjectRef) else one for one in arguments]
        self.num_bytes += len(pickle.dumps(plain))
        return super()._send(worker, method, *arguments)

    async def _answer(self, worker: int, reference: Any) -> Any:
        answer = await super()._answer(worker, reference)
        self.num_bytes += len(ray.cloudpickle.dumps(answer))
        return answer


@pytest.fixture(scope="module")
def cluster(no_ray: None) -> Iterator[None]:
    """A Ray cluster that the workers find and leave running."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def launch(setup: WorkerSetup) -> MeasuredWorkers:
    workers = MeasuredWorkers(setup)
    asyncio.run(workers.start(setup))
    return workers


@pytest.fixture(scope="module")
def pair(cluster: None) -> Iterator[MeasuredWorkers]:
    """Two workers that train and generate in turns."""
    setup = kit.with_knobs(kit.setup_of("cluster=cpu-1x2"), "score", hang="never")
    workers = launch(dataclasses.replace(setup, collective_timeout=10.0))
    yield workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_actors, "CLOSE_SECONDS", 2.0)  # the last tests leave a worker that does not answer
        asyncio.run(workers.close())
    assert ray.is_initialized()


def go(work: Awaitable[T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(120):
            return await work

    return asyncio.run(limited())


async def generate(workers: RayWorkers, version: int = 0, groups: range = range(4)) -> list[Any]:
    """Generate groups, half of them on each worker."""
    half = len(groups) // 2
    await workers.wake("actor@gen", version)
    await workers.open_groups(0, kit.group_tasks(GEN, groups[:half]))
    await workers.open_groups(1, kit.group_tasks(GEN, groups[half:]))
    events = await kit.collect(workers, 0, 2 * half) + await kit.collect(workers, 1, 2 * half)
    await workers.sleep("actor@gen", SleepLevel.KEEP_WEIGHTS)
    return events


async def score(workers: RayWorkers, samples: dict[int, range]) -> None:
    for worker, held in samples.items():
        for node in ("score", "judged"):
            await workers.compute(worker, kit.sample_tasks(node, held))
            for event in await kit.collect(workers, worker, len(held)):
                assert not isinstance(event, Failed), event


HALVES = {0: range(4), 1: range(4, 8)}


def test_a_separate_engine_pulls_weights_and_ray_is_stopped_after(no_ray: None) -> None:
    """Where the planner does not know a model's sizes, tensors are gathered whole before they are sent."""
    setup = kit.setup_of("cluster=cpu-1x2", "models.actor.group=train", "models.actor.gen.group=rollout")
    (route,) = setup.plan.weights
    assert (route.how, setup.plan.replica(route.dst).workers) == ("pull", (1,))
    unknown = dataclasses.replace(route, rows=(), worker_sets=())
    setup = dataclasses.replace(setup, plan=dataclasses.replace(setup.plan, weights=(unknown,)))

    async def work() -> None:
        workers = MeasuredWorkers(setup)
        try:
            await workers.start(setup)
            loaded = await workers.wake("actor@gen", 0)
            assert (loaded.num_bytes, loaded.sent_checksums) == (route.moved_bytes, loaded.engine_checksums)
            await train_and_compare(workers)
        finally:
            await workers.close()
        await workers.close()

    go(work())
    assert not ray.is_initialized()


async def train_and_compare(workers: MeasuredWorkers) -> None:
    """Worker 0 trains, worker 1 generates before and after; both agree on the log-probs."""
    logprobs = ("actor_gen/behav_logprobs", "actor_gen/theta_logprobs")
    tokens = ("actor_gen/input_ids", "actor_gen/loss_mask")
    for version, samples in ((0, tuple(range(8))), (1, tuple(range(8, 16)))):
        await workers.wake("actor@gen", version)
        await workers.open_groups(1, kit.group_tasks(GEN, range(samples[0] // 2, samples[0] // 2 + 4)))
        events = await kit.collect(workers, 1, 8)
        assert {(event.oldest, event.newest) for event in events} == {(version, version)}
        await workers.transfer(Moves.of([Move(1, 0, samples, (*tokens, logprobs[0]))]))
        await workers.run({0: kit.task("recheck", samples)})
        (parcel,) = await workers._actors[0].export.remote([(samples, logprobs)])
        columns = parcel[GEN].columns
        drawn, theta = columns["behav_logprobs"].values, columns["theta_logprobs"].values
        np.testing.assert_allclose(drawn, theta, atol=1e-4)
        if version == 0:
            await score(workers, {1: range(8)})
            fields = ("actor_gen/judged", "actor_gen/reward")
            await workers.transfer(Moves.of([Move(1, 0, samples, fields)]))
            for node in ("advantage", "shifted", "learn"):
                await workers.run({0: kit.task(node, samples)})


def test_a_step_over_two_workers(pair: MeasuredWorkers) -> None:
    async def work() -> None:
        events = await generate(pair)
        assert all(isinstance(event, SampleReady) and event.newest == 0 for event in events)
        await score(pair, HALVES)
        there = Move(
            1, 0, tuple(range(4, 8)), ("actor_gen/judged", "actor_gen/loss_mask", "actor_gen/reward")
        )
        assert await pair.transfer(Moves.of([there])) > 0
        (result,) = await pair.run({0: kit.task("advantage", tuple(range(8)))})
        assert (result.worker, result.samples) == (0, tuple(range(8)))
        await pair.run({0: kit.task("shifted", tuple(range(8)))})
        back = Move(0, 1, tuple(range(4, 8)), ("actor_gen/advantages", "actor_gen/shifted"))
        await pair.transfer(Moves.of([back]))
        shards = {0: kit.task("learn", (0, 1, 2, 3)), 1: kit.task("learn", (4, 5, 6, 7), dp=1)}
        trained = await pair.run(shards)
        assert trained[0].metrics == trained[1].metrics
        assert trained[0].metrics["grad_norm"] > 0
        events = await generate(pair, version=1, groups=range(4, 8))
        assert {(event.oldest, event.newest) for event in events} == {(1, 1)}
        again = {
            0: kit.task("recheck", tuple(range(8, 12))),
            1: kit.task("recheck", tuple(range(12, 16)), dp=1),
        }
        await pair.run(again)
        for worker, samples in ((0, range(8, 12)), (1, range(12, 16))):
            fields = ("actor_gen/behav_logprobs", "actor_gen/theta_logprobs")
            (parcel,) = await pair._actors[worker].export.remote([(tuple(samples), fields)])
            columns = parcel[GEN].columns
            drawn, theta = columns["behav_logprobs"].values, columns["theta_logprobs"].values
            np.testing.assert_allclose(drawn, theta, atol=1e-4)
        await asyncio.gather(*(pair.release(worker, tuple(range(16)), GEN, None) for worker in (0, 1)))

    go(work())


async def put(workers: RayWorkers, worker: int, parcel: Any) -> None:
    """Put a parcel into a worker's store, as if a node had made it there."""
    await workers._actors[worker].__ray_call__.remote(lambda actor, sent: actor._worker.receive(sent), parcel)


def test_payload_does_not_pass_the_driver(pair: MeasuredWorkers) -> None:
    lengths = np.full(64, NUM_BYTES // 64 // 8, np.int64)
    values = np.arange(NUM_BYTES // 8, dtype=np.int64)
    samples = np.arange(1000, 1064)
    batch = Batch(samples, samples // 2, lengths, {"payload": Column(Unit.TOKEN, values)})
    ids = tuple(samples.tolist())

    async def work() -> None:
        await put(pair, 0, ray.put({GEN: batch}))
        pair.num_bytes = 0
        first = Move(0, 1, ids[:32], ("actor_gen/payload",))
        second = Move(0, 1, ids[32:], ("actor_gen/payload",))
        assert await pair.transfer(Moves.of([first, second])) == NUM_BYTES
        assert 0 < pair.num_bytes < 0.01 * NUM_BYTES
        (parcel,) = await pair._actors[1].export.remote([(ids[::-1], ("actor_gen/payload",))])
        moved = parcel[GEN].columns["payload"].values.reshape(64, -1)
        np.testing.assert_array_equal(moved, values.reshape(64, -1)[::-1])
        for worker in (0, 1):
            await pair.release(worker, ids, GEN, None)

    go(work())


def test_a_hanging_body_is_killed_within_its_actor(pair: MeasuredWorkers) -> None:
    async def work() -> None:
        await pair.wake("actor@gen", 1)
        await pair.open_groups(0, kit.group_tasks(GEN, range(100, 102)))
        await kit.collect(pair, 0, 4)
        await pair.sleep("actor@gen", SleepLevel.KEEP_WEIGHTS)
        samples = (200, 201, 202, 203)
        (parcel,) = await pair._actors[0].export.remote([(samples, ("actor_gen/answer",))])
        answers = parcel[GEN].columns["answer"].values
        await put(pair, 0, {GEN: _renamed(parcel[GEN], answers)})
        await pair.compute(0, kit.sample_tasks("score", list(samples)))
        events = {event.key: event for event in await kit.collect(pair, 0, 4)}
        assert [(key, event.reason) for key, event in events.items() if isinstance(event, Failed)] == [
            (201, "timeout")
        ]
        await pair.release(0, samples, GEN, None)

    go(work())


def _renamed(batch: Batch, answers: list[str]) -> Batch:
    """The second sample's answer becomes the one on which the body hangs."""
    answers = [answers[0], "never", *answers[2:]]
    return batch.with_columns({"answer": Column(Unit.TEXT, answers)})


def test_an_error_crosses_with_its_line(pair: MeasuredWorkers) -> None:
    with pytest.raises(RunError, match=r"node 'view_mean', step 8, worker 1: "):
        go(pair.run({1: kit.task("view_mean", (1,), step=7)}))


def test_a_missing_rank_is_reported(pair: MeasuredWorkers) -> None:
    async def work() -> None:
        await generate(pair, version=1, groups=range(300, 304))
        missing = (
            r"running node 'recheck', step 10: worker 1 \(rank 1 of actor@train\) did not join within 10 s: "
            "it is idle, because it was not called or has finished; worker 0 waits"
        )
        with pytest.raises(RunError, match=missing):
            await pair.run({0: kit.task("recheck", (600, 601), step=9)})

    go(work())


def test_a_worker_that_dies_idle_is_named_at_once(pair: MeasuredWorkers) -> None:
    async def work() -> None:
        async def poll() -> None:
            while True:  # what an earlier call left is reported first
                await pair.poll(1)

        waiting = asyncio.ensure_future(poll())
        await asyncio.sleep(0.1)
        ray.kill(pair._actors[1])
        async with asyncio.timeout(pair._timeout / 2):
            with pytest.raises(RunError, match="worker 1 died while idle"):
                await waiting

    go(work())
