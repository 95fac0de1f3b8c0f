"""Plans whose replicas share only some of their devices: memory, time and reports."""

from __future__ import annotations

import re
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hflow.launch.compile import Compiled, compile_recipe
from hflow.planner.diff import diff_plans
from hflow.planner.memory.phases import GENERATE
from hflow.planner.serialise import to_json
from hflow.report.graph_text import plan_dot, plan_mermaid
from hflow.report.page import render_page
from hflow.report.plan_text import render_plan
from hflow.runtime.simulation.simulate_plan import simulate_plan

ROOT = Path(__file__).parents[2]
LARGE = ("model@models.actor=qwen2.5-7b", "models.actor.path=null", "models.actor.gen.engine=vllm")
ENGINES_EVERYWHERE = "actor.gen=all:d4t2 actor,ref=0-3 critic=4-7"
ACTOR_EVERYWHERE = "actor,actor.gen=all critic=0-3 ref=4-7"


@cache
def compiled(placement: str, *overrides: str) -> Compiled:
    return compile_recipe(
        ROOT / "recipes" / "ppo.py", ["cluster=h100-1x8", f"placement={placement}", *overrides]
    )


def test_each_group_counts_the_replicas_on_it():
    plan = compiled(ACTOR_EVERYWHERE).plan
    assert plan.forecast is not None
    for group, other in (("critic", "ref@infer"), ("ref", "critic@train")):
        rows = [row for row in plan.forecast.memory if row.group == group]
        names = {item.name.split()[0] for row in rows for item in row.resident}
        assert {"actor@train"} <= names
        assert other not in names
        assert "actor_train" in {row.phase for row in rows}


def test_an_engine_has_the_cache_that_its_fullest_group_leaves():
    """The critic's optimizer leaves less room than nothing but a reference model would."""
    overrides = ("models.critic.backend=megatron", "models.actor.backend=megatron", *LARGE)
    plan = compiled("actor.gen=all:d4t2 actor,critic=0-3:d1t4 ref=4-7", *overrides).plan
    assert plan.forecast is not None
    caches = {
        (row.group, item.num_bytes)
        for row in plan.forecast.memory
        for item in row.transient
        if row.phase == GENERATE and item.name.endswith("KV cache")
    }
    assert {group for group, _ in caches} == {"actor", "ref"}
    (engine,) = plan.engines
    assert {size for _, size in caches} == {engine.cache_bytes}


@pytest.mark.parametrize("placement", [ENGINES_EVERYWHERE, ACTOR_EVERYWHERE])
def test_the_simulated_step_takes_as_long_as_planned(placement: str):
    found = simulate_plan(compiled(placement, *LARGE, "models.critic.offload=all", "batch=64").plan, 16)
    assert found.plan.forecast is not None
    assert found.plan.forecast.period is not None
    assert found.period == pytest.approx(found.plan.forecast.period.seconds, rel=0.05)
    assert {lane for lane, _ in found.run.idle} == {group.name for group in found.plan.groups}


def test_reports_name_all_groups_of_a_replica_and_of_a_node():
    engines, actor = compiled(ENGINES_EVERYWHERE).plan, compiled(ACTOR_EVERYWHERE).plan
    out = StringIO()
    Console(width=110, file=out).print(render_plan(engines))
    text = out.getvalue()
    assert re.search(r"actor@gen .* d4t2p1 +actor, critic +0-7", text)
    assert re.search(r"critic +4-7 +\[actor@gen\] → critic_inf", text)
    for source in (plan_dot(actor), plan_mermaid(actor)):
        assert "groups critic and ref: devices 0-7" in source
        assert "order of ref and critic" in source
    page = render_page(actor)
    assert "critic, ref" in page
    diff = diff_plans(to_json(engines), to_json(actor))
    assert any("group" in str(row) for row in diff.decided)
