"""Plans, setups and orders for the tests of workers; the parts themselves are the real ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hflow.launch.compiled import compile_recipe
from hflow.launch.setup import make_setup
from hflow.plan.ir import Plan
from hflow.workers.base import (
    ComputeOrder,
    GroupOrder,
    NodeTask,
    Report,
    ShardInput,
    WorkerEvent,
    Workers,
    WorkerSetup,
)

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


def setup_of(*overrides: str, recipe: Path = RECIPE) -> WorkerSetup:
    return make_setup(compile_recipe(recipe, (*TINY, *overrides)))


async def collect(workers: Workers, worker: int, count: int) -> list[WorkerEvent]:
    """Poll one worker until it reported so many events."""
    events: list[WorkerEvent] = []
    while len(events) < count:
        report: Report = await workers.poll(worker)
        events += report.events
    assert len(events) == count, events
    return events


def group_orders(stream: str, groups: range, size: int = 2) -> list[GroupOrder]:
    return [GroupOrder(stream, g, g, tuple(range(g * size, (g + 1) * size))) for g in groups]


def sample_orders(node: str, samples: list[int] | range) -> list[ComputeOrder]:
    return [ComputeOrder(node, sample, (sample,)) for sample in samples]


def group_of(node: str, groups: range, size: int = 2) -> list[ComputeOrder]:
    return [ComputeOrder(node, g, tuple(range(g * size, (g + 1) * size))) for g in groups]


def task(node: str, *shards: tuple[int, ...], step: int = 0, dp: int = 0) -> NodeTask:
    return NodeTask(node, step, tuple(ShardInput(dp + i, (held,)) for i, held in enumerate(shards)))


def with_knobs(setup: WorkerSetup, node: str, **knobs: Any) -> WorkerSetup:
    """The setup with other hyper-parameters of one node."""
    program = setup.programs[node]
    changed = dataclasses.replace(program, knobs={**program.knobs, **knobs})
    return dataclasses.replace(setup, programs={**setup.programs, node: changed})


def gen_replica(plan: Plan) -> str:
    return next(replica.name for replica in plan.replicas if replica.role == "gen")
