"""Plans, setups and tasks for tests of workers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from hflow.engines.driver import EngineDriver
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.worker_setup import make_setup
from hflow.workers.inproc import InprocWorkers
from hflow.workers.interface import (
    ComputeTask,
    GroupTask,
    NodeTask,
    ShardInput,
    WorkerEvent,
    WorkerReport,
    Workers,
    WorkerSetup,
)

T = TypeVar("T")
RECIPE = Path(__file__).with_name("worker_recipe.py")
TINY = (
    "+model@models.actor=tiny-qwen2",
    "+data@data.train=addition",
    "models.actor.architecture.hidden_size=32",
    "models.actor.architecture.intermediate_size=64",
    "models.actor.architecture.num_attention_heads=2",
    "models.actor.architecture.num_key_value_heads=2",
    "models.actor.optim.lr=0.01",
    "data.train.shuffle=false",
    "batch=4",
    "nodes.actor_gen.max_tokens=6",
)


def setup_of(*overrides: str) -> WorkerSetup:
    return make_setup(compile_recipe(RECIPE, (*TINY, *overrides)))


async def collect(workers: Workers, worker: int, count: int) -> list[WorkerEvent]:
    """Poll one worker until it has reported `count` events."""
    events: list[WorkerEvent] = []
    while len(events) < count:
        report: WorkerReport = await workers.poll(worker)
        events += report.events
    assert len(events) == count, events
    return events


def driver_of(workers: InprocWorkers, replica: str = "actor@gen") -> EngineDriver:
    """Return the driver of a replica's engine."""
    return workers._worker._engines._drivers[replica]


def engine_module_of(workers: InprocWorkers) -> nn.Module:
    """Return the module of the embedded engine of actor."""
    engine = driver_of(workers)._engine
    assert isinstance(engine, EmbeddedEngine)
    return engine._module


def group_tasks(stream: str, groups: range, size: int = 2) -> list[GroupTask]:
    return [GroupTask(stream, g, g, tuple(range(g * size, (g + 1) * size))) for g in groups]


def sample_tasks(node: str, samples: list[int] | range) -> list[ComputeTask]:
    return [ComputeTask(node, sample, (sample,)) for sample in samples]


def group_of(node: str, groups: range, size: int = 2) -> list[ComputeTask]:
    return [ComputeTask(node, g, tuple(range(g * size, (g + 1) * size))) for g in groups]


def task(node: str, *shards: tuple[int, ...], step: int = 0, dp: int = 0) -> NodeTask:
    return NodeTask(node, step, tuple(ShardInput(dp + i, (held,)) for i, held in enumerate(shards)))


def with_knobs(setup: WorkerSetup, node: str, **knobs: Any) -> WorkerSetup:
    """Return the setup with other hyper-parameters of one node."""
    return with_program(setup, node, knobs={**setup.programs[node].knobs, **knobs})


def with_program(setup: WorkerSetup, node: str, **changes: Any) -> WorkerSetup:
    """Return the setup with another body or other options of one node."""
    program = setup.programs[node]
    if options := changes.pop("options", None):
        changes["options"] = {**program.options, **options}
    return dataclasses.replace(
        setup, programs={**setup.programs, node: dataclasses.replace(program, **changes)}
    )


def with_workers(setup: WorkerSetup, work: Callable[[InprocWorkers], Awaitable[T]]) -> T:
    """Start workers in this process, do the work, stop them."""

    async def main() -> T:
        workers = InprocWorkers()
        try:
            await workers.start(setup)
            async with asyncio.timeout(120):
                return await work(workers)
        finally:
            await workers.close()

    return asyncio.run(main())


def read(workers: InprocWorkers, stream: str, field: str, samples: Sequence[int]) -> list[Any]:
    """Return values of the store as Python values."""
    return workers._worker._store.values(stream, field, samples)
