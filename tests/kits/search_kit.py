"""Problems for the tests of the search, and the best plan by trying everything."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

from hflow.graph.ir import Graph
from hflow.launch.compile import read_recipe
from hflow.launch.plan_request import plan_request
from hflow.planner.request import PlanRequest
from hflow.planner.search import PLACEMENT, Evaluator, SearchProblem, free_settings
from hflow.planner.search.devices import assign_devices, compositions
from hflow.planner.search.explore import divisions

RECIPES = Path(__file__).parents[2] / "recipes"
LENGTHS = (
    "nodes.actor_gen.max_tokens=1024",
    "models.actor.gen.max_model_len=1536",
    "workload.prompt=512",
    "workload.response_mean=512",
    "workload.response_cv=0.5",
    "schedule.max_concurrent=4096",
)


def problem(
    recipe: str, cluster: str, model: str, *overrides: str, tunes: bool = True
) -> tuple[Graph, PlanRequest]:
    """A recipe with models of real sizes on a cluster; everything that may be chosen is free.

    Args:
        recipe: its name.
        cluster: its name.
        model: one of `configs/model`.
        overrides: further configuration.
        tunes: whether settings of models are free besides the placement.
    """
    keys = [
        f"cluster={cluster}",
        f"model@models.actor={model}",
        "models.actor.path=null",
        "models.actor.dtype=bf16",
        "models.actor.gen.engine=vllm",
        "models.actor.backend=megatron",
        *LENGTHS,
    ]
    if recipe.startswith("ppo"):
        keys += ["models.critic.backend=megatron", "+models.ref.backend=megatron"]
    file = RECIPES / f"{recipe}.py"
    config, graph, _ = read_recipe(file, [*keys, *overrides])
    request = plan_request(config, graph, file)
    settings = free_settings(request.models) - {"schedule.max_concurrent"} if tunes else frozenset()
    return graph, replace(request, free=frozenset({PLACEMENT}) | settings)


def exhaustive(graph: Graph, request: PlanRequest) -> float:
    """The seconds of the best of all plans: every division, size and combination of options."""
    assert request.hardware is not None
    evaluator = Evaluator(SearchProblem(graph, request, request.hardware))
    free, cluster, best = evaluator.problem.free_devices, request.cluster, math.inf
    for blocks in divisions(evaluator):
        partition = evaluator.partition(blocks)
        for sizes in compositions(len(free), len(blocks), tuple(range(1, len(free) + 1))):
            devices = assign_devices(sizes, free, cluster)
            if devices is None:
                continue
            fitting = []
            for block, size in zip(blocks, sizes, strict=True):
                tables = [evaluator.table.options(name, tuple(range(size))) for name in block]
                choices = (evaluator.group(block, options) for options in itertools.product(*tables))
                fitting.append([choice for choice in choices if choice is not None])
            for groups in itertools.product(*fitting):
                choice = evaluator.choice(partition, devices, groups, best)
                best = best if choice is None else choice.period
    return best
