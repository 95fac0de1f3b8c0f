"""Time to load new weights into two engines: slices by the plan's rows, against gathered whole tensors.

    python benchmarks/weight_routes.py

Four Ray workers: a model is sharded over two (FSDP2), the two others have an engine each. By rows, each
trainer sends its own half once for both engines, without a collective. Whole, collectives gather all tensors
and one worker sends them. Both move the same bytes to the engines.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import harness

from hflow.launch.compile import compile_recipe
from hflow.launch.worker_setup import make_setup
from hflow.planner.ir import Plan
from hflow.planner.model_shape import num_parameters
from hflow.workers.interface import Workers
from hflow.workers.ray.ray_workers import RayWorkers

RECIPE = Path(__file__).parents[1] / "recipes" / "grpo.py"
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
    workers: Workers = RayWorkers()
    assert isinstance(workers, RayWorkers)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    print(harness.write("weight-routes", asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
