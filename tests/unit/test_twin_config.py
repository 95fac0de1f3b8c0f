"""The configuration that the runs of a twin share, where the engine is one that cannot replay samples."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hflow.launch.compile import compile_recipe, read_recipe
from hflow.launch.twin_run import comparable_config, configuration
from hflow.planner.ir import Plan

PPO = Path(__file__).parents[2] / "recipes" / "ppo.py"
VLLM = ["models.actor.path=null", "models.actor.gen.engine=vllm", "models.actor.gen.cache_gib=1"]


def twin_plan(*overrides: str) -> Plan:
    config, graph, _ = read_recipe(PPO, [*VLLM, *overrides])
    comparable = comparable_config(config, graph, 2, "out")
    return compile_recipe(PPO, config=dataclasses.replace(comparable, name="twin")).plan


def placed(plan: Plan) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    return {r.name: (r.backend, str(r.layout), r.workers) for r in plan.replicas}


@pytest.mark.parametrize(
    "overrides",
    [
        ["placement=actor=0-1:d2 critic,ref=actor:d2 actor.gen=2-3:t2", "cluster=cpu-1x4"],
        [
            "placement=actor,actor.gen=0-1:t2 critic,ref=2-3",
            "models.actor.backend=megatron",
            "cluster=cpu-1x4",
        ],
        ["models.actor.gen.layout=t2", "cluster=cpu-1x2"],
    ],
    ids=["of its own", "shared", "without a placement"],
)
def test_tensor_ranks_of_an_engine_become_data_ranks(overrides: list[str]) -> None:
    """On the same workers; all else keeps its place."""
    configured = placed(compile_recipe(PPO, [*VLLM, *overrides]).plan)
    backend, layout, workers = configured["actor@gen"]
    assert (backend, layout) == ("vllm", "d1t2p1")
    assert placed(twin_plan(*overrides)) == configured | {"actor@gen": ("embedded", "d2t1p1", workers)}


def test_placements_that_the_planner_chooses_are_compared_as_chosen() -> None:
    auto = ["placement=auto", "cluster=cpu-1x2"]
    chosen = configuration(PPO, auto, as_configured=True)[0]
    assert chosen.placement is not None
    assert "actor" in chosen.placement
    assert configuration(PPO, auto, as_configured=False)[0].placement is None
