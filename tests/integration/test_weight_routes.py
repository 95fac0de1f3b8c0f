"""Weight routes over real processes: engines hold the trained weights, and only planned bytes move."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import worker_kit as kit
from safetensors.torch import load_file

from hflow.data.batches.batch import Batch, Column
from hflow.planner.make import placement
from hflow.planner.plan.routing import on_workers
from hflow.types import Unit
from hflow.workers.interface import NodeTask, ShardInput, WeightsLoaded, WorkerSetup
from hflow.workers.ray.ray_actors import RayActors
from hflow.workers.ray.ray_workers import RayWorkers

pytestmark = pytest.mark.ray

GEN = "actor_gen"
APART = ("cluster=cpu-1x4", "groups.train=[0,1]", "groups.rollout=[2,3]")
PLACES = ("models.actor.group=train", "models.actor.gen.group=rollout")
LAYOUTS = {
    "torch d2 in bf16": ("models.actor.layout=d2", "models.actor.dtype=bf16"),
    "megatron t2": ("models.actor.backend=megatron", "models.actor.layout=t2"),
}
HEADS = {"torch d2 in bf16": (0, 1), "megatron t2": (0,)}
ROADS = [
    ("torch d2 in bf16", "store"),
    ("torch d2 in bf16", "collective"),
    ("megatron t2", "shared"),
    ("megatron t2", "disk"),
]


def go(work: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(240):
            await work

    asyncio.run(limited())


def batch() -> Batch:
    """What the train node reads, for 8 samples of 6 tokens."""
    rng = np.random.default_rng(0)
    samples, lengths = np.arange(8), np.full(8, 6, np.int64)
    tokens = int(lengths.sum())
    columns = {
        "input_ids": Column(Unit.TOKEN, rng.integers(3, 15, tokens)),
        "loss_mask": Column(Unit.TOKEN, np.arange(tokens) % 6 > 1),
        "advantages": Column(Unit.TOKEN, rng.normal(0, 1, tokens).astype(np.float32)),
        "shifted": Column(Unit.SEQUENCE, np.ones(8, np.float32)),
    }
    return Batch(samples, samples // 2, lengths, columns)


async def train(workers: RayWorkers, heads: tuple[int, ...], step: int) -> None:
    """One step of the node on samples that are put into the heads' stores."""
    shares = np.array_split(np.arange(8), len(heads))
    for head, share in zip(heads, shares, strict=True):
        sent = {GEN: batch().take(share.tolist())}
        await workers._actors[head].__ray_call__.remote(lambda actor, x: actor._worker.receive(x), sent)
    tasks = {worker: NodeTask("learn", step, ()) for worker in (0, 1)}
    for d, (head, share) in enumerate(zip(heads, shares, strict=True)):
        tasks[head] = NodeTask("learn", step, (ShardInput(d, (tuple(share.tolist()),)),))
    results = await workers.run(tasks)
    assert any(result.metrics.get("grad_norm", 0) > 0 for result in results)


async def engine_weights(workers: RayWorkers, worker: int) -> dict[str, torch.Tensor]:
    def read(actor: Any) -> dict[str, torch.Tensor]:
        module = actor._worker._engines._drivers["actor@gen"]._engine._module
        return {name: tensor.clone() for name, tensor in module.named_parameters()}

    return await workers._actors[worker].__ray_call__.remote(read)


@pytest.mark.parametrize(("name", "transport"), ROADS)
def test_engines_pull_the_trained_weights(
    four_processes: RayActors, name: str, transport: str, tmp_path: Path
) -> None:
    heads = HEADS[name]
    setup = kit.setup_of(*APART, *PLACES, *LAYOUTS[name], f"models.actor.gen.transport={transport}")
    setup = replace(setup, weights_directory=str(tmp_path / "weights"))
    (route,) = setup.plan.weights
    assert (route.how, bool(route.rows)) == ("pull", True)
    assert (setup.plan.replica(route.src).heads, setup.plan.replica(route.dst).workers) == (heads, (2, 3))

    async def work() -> None:
        workers = RayWorkers(four_processes)
        try:
            await workers.start(setup)
            assert (await workers.wake("actor@gen", 0)).num_bytes == route.moved_bytes
            start = await engine_weights(workers, 2)
            for step in range(2):
                await train(workers, heads, step)
            await workers.save("actor", str(tmp_path))
            await workers.finish_save("actor", str(tmp_path))
            loaded = await workers.wake("actor@gen", 1)
            assert loaded.num_bytes == route.moved_bytes
            assert loaded.sent_checksums == loaded.engine_checksums == (loaded.engine_checksums[0],) * 2
            assert await workers.wake("actor@gen", 1) == WeightsLoaded()
            compare(start, [await engine_weights(workers, worker) for worker in (2, 3)])
        finally:
            await workers.close()

    def compare(start: dict[str, torch.Tensor], held: list[dict[str, torch.Tensor]]) -> None:
        saved = load_file(tmp_path / "model.safetensors")
        for weights in held:
            assert weights.keys() == saved.keys() == start.keys()
            assert all(torch.equal(x, saved[key].to(x.dtype)) for key, x in weights.items())
        assert any(not torch.equal(x, start[key]) for key, x in held[0].items())
        item = 2 if "bf16" in name else 4
        assert route.moved_bytes == 2 * item * sum(math.prod(x.shape) for x in saved.values())

    go(work())


def test_engines_in_another_order_of_devices_draw_the_same(
    four_processes: RayActors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine holds the same weights, and draws the same tokens of the same samples, on any device."""

    async def work(setup: WorkerSetup, drawn: dict[int, tuple[Any, ...]], sums: list[int]) -> None:
        workers = RayWorkers(four_processes)
        fields = ("actor_gen/input_ids", "actor_gen/behav_logprobs")
        try:
            await workers.start(setup)
            loaded = await workers.wake("actor@gen", 0)
            sums += loaded.engine_checksums
            for d, head in enumerate(setup.plan.replica("actor@gen").heads):
                samples = range(2 * d, 2 * d + 2)
                await workers.open_groups(head, kit.group_tasks(GEN, range(d, d + 1)))
                await kit.collect(workers, head, 2)
                (parcel,) = await workers._actors[head].export.remote([(tuple(samples), fields)])
                columns = parcel[GEN].columns
                drawn[d] = tuple(columns[name].values.tolist() for name in ("input_ids", "behav_logprobs"))
        finally:
            await workers.close()

    found: list[tuple[dict[int, tuple[Any, ...]], list[int]]] = []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        monkeypatch.setattr(
            placement,
            "order_engine_ranks",
            lambda graph, replicas, request, order=order: tuple(
                on_workers(replica, order) if replica.role == "gen" else replica for replica in replicas
            ),
        )
        setup = kit.setup_of("cluster=cpu-1x4")
        assert setup.plan.replica("actor@gen").heads == order
        found.append(({}, []))
        go(work(setup, *found[-1]))
    assert found[0] == found[1]
    assert len(found[0][0]) == len(found[0][1]) == 4
