"""Seconds and bytes of bringing new weights to engines, over each transport.

    python -m benchmarks.speed.weight_sync [--routes embedded vllm ...] [--sizes 10 100 500]

Ray workers on this machine. `publish` is how long the trainers' devices are busy, `pause` how long an engine
loads weights that are published, and `memcpy` copies as many bytes once, in one process on one core. With
`changes`, 1 % of the entries change between two versions, and only these are sent.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import harness
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.worker_setup import make_processes, make_setup
from hflow.planner.models.descriptors import engine_kind
from hflow.planner.plan.rows import Plan
from hflow.shapes.model_shape import num_parameters
from hflow.workers.ray.ray_workers import RayWorkers

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.py"
ENGINE = "actor@gen"
SIZES = {
    10: {"hidden_size": 256, "num_hidden_layers": 8, "vocab_size": 8192},
    100: {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 16384},
    500: {"hidden_size": 1536, "num_hidden_layers": 14, "vocab_size": 16384},
}
"""Millions of parameters -> sizes of the model."""
ROUTES = {
    "torch d1 -> embedded d1": ("[0]", "[1]", ["models.actor.layout=d1"]),
    "torch d2 -> vllm t1": ("[0,1]", "[2]", ["models.actor.layout=d2", "models.actor.gen.engine=vllm"]),
    "torch d2 -> vllm t2": (
        "[0,1]",
        "[2,3]",
        ["models.actor.layout=d2", "models.actor.gen.engine=vllm", "models.actor.gen.layout=t2"],
    ),
    "megatron t2p2 -> vllm t2": (
        "[0,1,2,3]",
        "[4,5]",
        [
            "models.actor.backend=megatron",
            "models.actor.layout=t2p2",
            "models.actor.gen.engine=vllm",
            "models.actor.gen.layout=t2",
        ],
    ),
}
"""Name -> devices of trainer and engine, and the configuration."""
WAYS = ("store", "disk", "shared", "collective", "shared, changes")


def overrides(route: str, size: int) -> list[str]:
    train, rollout, config = ROUTES[route]
    sizes = SIZES[size] | {"intermediate_size": 4 * SIZES[size]["hidden_size"]}
    sizes |= {"num_attention_heads": sizes["hidden_size"] // 64, "num_key_value_heads": 2}
    num_devices = 1 + max(int(x) for x in rollout.strip("[]").split(","))
    return [
        f"cluster=cpu-1x{num_devices}",
        f"groups.train={train}",
        f"groups.rollout={rollout}",
        "models.actor.group=train",
        "models.actor.gen.group=rollout",
        "models.actor.path=null",
        "models.actor.dtype=bf16",
        "models.actor.activation_checkpointing=true",
        "models.actor.tokens_per_microbatch=512",
        *config,
        *(f"models.actor.architecture.{key}={value}" for key, value in sizes.items()),
    ]


def follow(actor: Any, plan: Plan, transport: str) -> None:
    """Let a worker send and receive over a transport."""
    publisher = actor._worker._publisher
    publisher.close()
    publisher._deltas.clear()
    publisher._routes._plan = plan
    publisher._settings = {
        name: dataclasses.replace(settings, name=transport, owner=f"{settings.owner}-{transport}")
        for name, settings in publisher._settings.items()
    }


def change(actor: Any, share: float) -> None:
    """Change a share of the entries that a trainer holds, each by an eighth of its size."""
    backend = actor._worker._backends.get("actor@train")
    for block in backend.blocks() if backend else ():
        block.values.mul_(1 + (torch.rand_like(block.values) < share) / 8)


async def measure(workers: RayWorkers, plan: Plan, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Each way in turn; its first versions, which open what later ones use, are not counted."""
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    version = 0
    await workers.wake(ENGINE, version)
    for way in WAYS:
        transport, _, changes = way.partition(", ")
        routes = tuple(dataclasses.replace(route, delta=bool(changes)) for route in plan.weights)
        own = dataclasses.replace(plan, weights=routes)
        await asyncio.gather(
            *(actor.__ray_call__.remote(follow, own, transport) for actor in workers._actors)
        )
        for index in range(rounds + 2):
            version += 1
            await asyncio.gather(
                *(actor.__ray_call__.remote(change, 0.01 if changes else 1.0) for actor in workers._actors)
            )
            start = time.perf_counter()
            spans = await workers.publish(ENGINE, version)
            published = time.perf_counter()
            loaded = await workers.wake(ENGINE, version)
            end = time.perf_counter()
            assert loaded.sent_checksums == loaded.engine_checksums
            if index > 1:
                rows[way].append(
                    {
                        "publish_seconds": published - start,
                        "pause_seconds": end - published,
                        "total_seconds": end - start,
                        "sent_bytes": sum(span.args["bytes"] for _, span in spans),
                        "received_bytes": loaded.num_bytes,
                    }
                )
    return rows


def memcpy_seconds(num_bytes: int, rounds: int) -> float:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


async def run(route: str, size: int, rounds: int) -> dict[str, Any]:
    setup = make_setup(compile_recipe(RECIPE, overrides(route, size)))
    (planned,) = setup.plan.weights
    assert planned.how == "pull"
    own_process = engine_kind(setup.plan.replica(planned.dst).backend).has_own_process
    minimum = planned.moved_bytes + (planned.held_bytes if own_process else 0)
    workers = RayWorkers(make_processes(setup.plan))
    try:
        await workers.start(setup)
        rows = await measure(workers, setup.plan, rounds)
    finally:
        await workers.close()
    return {
        "route": route,
        "parameters": num_parameters(dict(setup.plan.shapes)["actor"]),
        "planned_bytes": minimum,
        "memcpy_seconds": memcpy_seconds(minimum, rounds),
        "ways": {
            way: {name: statistics.median(row[name] for row in measured) for name in measured[0]}
            for way, measured in rows.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--routes", nargs="+", default=[""], help="names contain one of these")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for route in ROUTES:
        for size in args.sizes if any(part in route for part in args.routes) else ():
            runs.append(asyncio.run(run(route, size, args.rounds)))
            path = harness.write("weight-sync", {"rounds": args.rounds, "runs": runs})
            print(runs[-1], path, sep="\n", flush=True)


if __name__ == "__main__":
    main()
