"""Time to load new weights into two engines: slices by the plan's rows, against gathered whole tensors.

    python -m benchmarks.speed.weight_routes [--engine-ranks]

Four Ray workers: a model is sharded over two (FSDP2), the two others have an engine each. By rows, each
trainer sends its own half once for both engines, without a collective. Whole, collectives gather all tensors
and one worker sends them. Both move the same bytes to the engines.

With `--engine-ranks`: the bytes of one version with the ranks of engines in the order of devices, and in the
plan's order, which moves the fewest. For layouts on eight GPUs by the plan alone, and on four Ray workers
with a megatron trainer and vLLM engines: what engines read from files of other devices, and what they took
from the shared memory of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib import harness
from hflow.launch.planning.compile import Compiled, compile_recipe
from hflow.launch.running.worker_setup import make_processes, make_setup
from hflow.planner.make import placement
from hflow.planner.plan.rows import Plan
from hflow.shapes.model_shape import num_parameters
from hflow.workers.interface import WorkerSetup
from hflow.workers.ray.ray_workers import RayWorkers

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.py"
ENGINE = "actor@gen"


def overrides(args: argparse.Namespace) -> list[str]:
    sizes = {
        "hidden_size": args.hidden,
        "intermediate_size": 4 * args.hidden,
        "num_hidden_layers": args.layers,
        "vocab_size": args.vocab,
    }
    return [
        "cluster=cpu-1x4",
        "groups.train=[0,1]",
        "groups.rollout=[2,3]",
        "models.actor.group=train",
        "models.actor.gen.group=rollout",
        "models.actor.path=null",
        *(f"models.actor.architecture.{key}={value}" for key, value in sizes.items()),
    ]


def without_rows(plan: Plan) -> Plan:
    """The plan of a model whose sizes the planner does not know."""
    bare = tuple(dataclasses.replace(route, rows=(), worker_sets=()) for route in plan.weights)
    return dataclasses.replace(plan, weights=bare)


def follow(actor: Any, plan: Plan) -> None:
    """Let a worker take its routes from this plan."""
    actor._worker._publisher._routes._plan = plan


async def measure(
    workers: RayWorkers, plans: dict[str, Plan], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Seconds and pulled bytes of each wake, by rows and whole in turn; the first round is not counted."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    version = 0
    for _ in range(rounds + 1):
        for name, plan in plans.items():
            await asyncio.gather(*(actor.__ray_call__.remote(follow, plan) for actor in workers._actors))
            start = time.perf_counter()
            num_bytes = (await workers.wake(ENGINE, version)).num_bytes
            rows[name].append({"seconds": time.perf_counter() - start, "pulled_bytes": num_bytes})
            version += 1
    return {name: measured[1:] for name, measured in rows.items()}


async def run(args: argparse.Namespace) -> dict[str, Any]:
    setup = make_setup(compile_recipe(RECIPE, overrides(args)))
    (route,) = setup.plan.weights
    assert route.how == "pull"
    workers = RayWorkers(make_processes(setup.plan))
    try:
        await workers.start(setup)
        rows = await measure(workers, {"whole": without_rows(setup.plan), "rows": setup.plan}, args.rounds)
    finally:
        await workers.close()
    sizes = dict(setup.plan.shapes)["actor"]
    return {
        "configuration": harness.numbers(args) | {"layouts": "torch d2 -> embedded d2", "dtype": "fp32"},
        "model_bytes": 4 * num_parameters(sizes),
        "planned_bytes": route.moved_bytes,
        "pulled_bytes": {
            name: sorted({row["pulled_bytes"] for row in found}) for name, found in rows.items()
        },
        "seconds": harness.compare(rows, "seconds", "whole"),
        "gib_per_second": {
            name: route.moved_bytes / 2**30 / math.fsum(row["seconds"] for row in found) * len(found)
            for name, found in rows.items()
        },
    }


PLANNED = [
    ("torch", "d8", "d4t2"),
    ("megatron", "d2t4", "d4t2"),
    ("megatron", "d4t2", "d2t4"),
    ("megatron", "d1t2p4", "d2t4"),
    ("megatron", "d1t8", "d2t4"),
]
"""Trainers and engines on eight GPUs; the last pair of Qwen2.5-32B, the others of 7B."""
RUN = [("t4", "d2t2")]
"""Trainers and engines on four workers."""


def compiled(overrides: list[str], ordered: bool) -> Compiled:
    """The recipe, with engine ranks in the plan's order or in that of the devices."""
    usual = placement.order_engine_ranks
    try:
        if not ordered:
            placement.order_engine_ranks = lambda graph, replicas, request: replicas
        return compile_recipe(RECIPE, overrides)
    finally:
        placement.order_engine_ranks = usual


def planned_bytes(backend: str, layout: str, gen_layout: str) -> dict[str, Any]:
    """Bytes of a version by the plan, in both orders."""
    found: dict[str, Any] = {"trainer": f"{backend} {layout}", "engines": f"vllm {gen_layout}"}
    model = "qwen2.5-32b" if "t8" in layout else "qwen2.5-7b"
    overrides = [
        "cluster=h100-1x8",
        f"model@models.actor={model}",
        "models.actor.path=null",
        "device_memory_gib=1000",
        f"models.actor.backend={backend}",
        "models.actor.gen.engine=vllm",
        f"placement=actor=all:{layout} actor.gen=all:{gen_layout}",
    ]
    for ordered in (False, True):
        plan = compiled(overrides, ordered).plan
        (route,) = plan.weights
        needed = route.moved_bytes + route.held_bytes
        row = {"moved_bytes": route.moved_bytes, "transport": route.transport, "near": route.near}
        found |= {"model": model, "needed_bytes": needed, "ordered" if ordered else "device order": row}
    return found


async def sent_bytes(setup: WorkerSetup) -> dict[str, Any]:
    """Bytes of one version: what was sent through files, and what engines took from there and in place."""
    workers = RayWorkers(make_processes(setup.plan))
    try:
        await workers.start(setup)
        await workers.wake(ENGINE, 0)
        spans = await workers.publish(ENGINE, 1)
        loaded = await workers.wake(ENGINE, 1)
        assert loaded.sent_checksums == loaded.engine_checksums
    finally:
        await workers.close()
    total = sum(span.args["bytes"] for _, span in spans)
    near = sum(span.args.get("near_bytes", 0) for _, span in spans)
    checksums = sorted(loaded.engine_checksums)
    return {
        "sent_through_files": total - near,
        "received_through_files": loaded.num_bytes - near,
        "received_in_place": near,
        "checksums": checksums,
    }


def run_orders(args: argparse.Namespace, layout: str, gen_layout: str) -> dict[str, Any]:
    found: dict[str, Any] = {"trainer": f"megatron {layout}", "engines": f"vllm {gen_layout}"}
    sizes = [row for row in overrides(args) if "architecture" in row]
    for ordered in (False, True):
        config = [
            "cluster=cpu-1x4",
            "models.actor.path=null",
            "models.actor.backend=megatron",
            "models.actor.gen.engine=vllm",
            "models.actor.gen.transport=disk",
            f"placement=actor=all:{layout} actor.gen=all:{gen_layout}",
            *sizes,
        ]
        setup = make_setup(compiled(config, ordered))
        with tempfile.TemporaryDirectory() as directory:
            setup = dataclasses.replace(setup, weights_directory=directory)
            measured = asyncio.run(sent_bytes(setup))
        (route,) = setup.plan.weights
        measured |= {"moved_bytes": route.moved_bytes, "held_bytes": route.held_bytes}
        found["ordered" if ordered else "device order"] = measured
    assert found["ordered"].pop("checksums") == found["device order"].pop("checksums")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-ranks", action="store_true")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.engine_ranks:
        measured = {
            "planned": [planned_bytes(*layouts) for layouts in PLANNED],
            "run": [run_orders(args, *layouts) for layouts in RUN],
        }
        print(harness.write("engine-ranks", measured))
    else:
        print(harness.write("weight-routes", asyncio.run(run(args))))


if __name__ == "__main__":
    main()
