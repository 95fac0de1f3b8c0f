"""Problems for the tests of the search, and the best plan by trying everything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

from hflow.graph.ir import Graph
from hflow.launch.planning.read_recipe import read_recipe
from hflow.launch.planning.request import plan_request
from hflow.planner.plan.request import PlanRequest
from hflow.planner.search import PLACEMENT, Evaluator, SearchProblem, free_settings
from hflow.planner.search.evaluate import GroupChoice
from hflow.planner.search.explore import divisions, spread_divisions
from hflow.planner.search.layouts import assign_devices, compositions
from hflow.planner.search.partition import Blocks, connected_blocks
from hflow.planner.search.replica_option import ReplicaOption
from hflow.shapes.layout import Layout

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
    recipe: str, cluster: str, model: str, *overrides: str, tunes: bool = True, offloads: bool = False
) -> tuple[Graph, PlanRequest]:
    """A recipe with models of real sizes on a cluster; everything that may be chosen is free.

    Args:
        recipe: its name.
        cluster: its name.
        model: one of `configs/model`.
        overrides: further configuration.
        tunes: whether settings of models are free besides the placement.
        offloads: whether `offload` is free in any case.
    """
    keys = [
        f"cluster={cluster}",
        "placement=null",
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
    settings = frozenset(key for key in settings if not key.endswith(".backend"))
    offload = {f"models.{name}.offload" for name in request.models if offloads}
    return graph, replace(request, free=frozenset({PLACEMENT}) | settings | offload)


def hand_placements(num_devices: int) -> dict[str, str]:
    """The placements of four models that people write."""
    half, parts = num_devices // 2, [num_devices * i // 8 for i in (0, 2, 4, 5, 8)]
    actor, critic, ref, gen = (f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in pairwise(parts))
    return {
        "all colocated": "actor,critic,ref,actor.gen=all",
        "pairs": f"actor,ref,actor.gen=0-{half - 1} critic={half}-{num_devices - 1}",
        "split": f"actor,critic,ref=0-{half - 1} actor.gen={half}-{num_devices - 1}",
        "apart": f"actor={actor} critic={critic} ref={ref} actor.gen={gen}",
    }


def exhaustive(graph: Graph, request: PlanRequest, *, spreads: bool = True) -> float:
    """The seconds of the best of all plans: every division, size and combination of options.

    Args:
        graph: a checked graph.
        request: what is free in it is tried.
        spreads: also try replicas that use the devices of several groups.
    """
    evaluator = Evaluator(SearchProblem(graph, request))
    free, cluster, best = evaluator.problem.free_devices, request.cluster, math.inf
    fitting: dict[tuple[Blocks, tuple[int, ...]], list[tuple[GroupChoice, ...]]] = {}
    for blocks in (*divisions(evaluator), *(spread_divisions(evaluator) if spreads else ())):
        for sizes in compositions(len(free), len(blocks), tuple(range(1, len(free) + 1))):
            devices = assign_devices(sizes, free, cluster)
            if devices is None:
                continue
            rows = []
            for part in connected_blocks(blocks):
                key = tuple(blocks[i] for i in part), tuple(sizes[i] for i in part)
                if key not in fitting:
                    fitting[key] = list(fitting_groups(evaluator, *key, math.inf if len(part) == 1 else best))
                rows.append(fitting[key])
            order = tuple(chain(*connected_blocks(blocks)))
            for choices in itertools.product(*rows):
                groups = [group for _, group in sorted(zip(order, chain(*choices), strict=True))]
                choice = evaluator.choice(blocks, devices, groups, best)
                best = best if choice is None else choice.period
    return best


def fitting_groups(
    evaluator: Evaluator, blocks: Blocks, sizes: tuple[int, ...], longest: float
) -> Iterator[tuple[GroupChoice, ...]]:
    """Every combination of options that fits, the fastest first, but those that cannot be better than others.

    A period only grows with the seconds of nodes, so a combination of which no node is faster is of no use.
    The seconds of new weights depend on the layouts of engine and trainer, so these have to be equal. Nor is
    one of use that takes longer than the best plan so far.
    """
    names = tuple(dict.fromkeys(chain(*blocks)))
    tables = [useful_options(evaluator, blocks, name, sizes) for name in names]
    kept: dict[tuple[Layout, ...], list[tuple[float, ...]]] = {}
    combinations = []
    for options in itertools.product(*tables):
        option_of = dict(zip(names, options, strict=True))
        if all(sum(option_of[name].total for name in block) < longest for block in blocks):
            combinations.append(evaluator.groups(blocks, option_of))
    for groups in sorted((c for c in combinations if c is not None), key=lambda c: sum(g.total for g in c)):
        options = tuple(option for group in groups for option in group.options)
        layouts = tuple(option.layout for option in options if has_engine(evaluator, option))
        seconds = tuple(value for group in groups for value in group.seconds.values())
        faster = kept.setdefault(layouts, [])
        if not any(no_larger(other, seconds) for other in faster):
            faster.append(seconds)
            yield groups


def useful_options(
    evaluator: Evaluator, blocks: Blocks, name: str, sizes: tuple[int, ...]
) -> list[ReplicaOption]:
    """The options of a replica but those that are neither faster nor smaller than another one.

    Engines keep all, as more memory makes their caches larger.
    """
    kept: dict[Layout | None, list[tuple[float, ...]]] = {}
    own = [i for i, block in enumerate(blocks) if name in block]
    common, found = evaluator.common_devices(blocks), []
    ends = list(itertools.accumulate(sizes))
    devices = [tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    for option in evaluator.options(name, blocks, devices, with_offload=True):
        memory = (evaluator.memory.sizes(evaluator.phases(blocks[i]), option, common) for i in own)
        costs = (*option.seconds.values(), *chain(*memory))
        better = kept.setdefault(option.layout if has_engine(evaluator, option) else None, [])
        if name.endswith("@gen") or not any(no_larger(other, costs) for other in better):
            better.append(costs)
            found.append(option)
    return found


def has_engine(evaluator: Evaluator, option: ReplicaOption) -> bool:
    """Whether an engine generates with the model of an option."""
    replicas = evaluator.problem.base.replicas
    return any(r.role == "gen" and r.model == option.replica.model for r in replicas)


def no_larger(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether no number of a row is larger than that of another row."""
    return all(a <= b for a, b in zip(one, other, strict=True))
