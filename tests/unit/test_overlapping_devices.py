"""Plans whose replicas share only some of their devices: memory, time, reports, and how they are chosen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from search_kit import problem

from hflow.graph.ir import Graph
from hflow.launch.planning.compile import Compiled, compile_recipe
from hflow.launch.planning.read_recipe import read_recipe
from hflow.launch.planning.request import plan_request
from hflow.planner.compile import compile_plan
from hflow.planner.diff import diff_plans
from hflow.planner.forecast.memory import MEMORY_MARGIN
from hflow.planner.forecast.memory.phases import GENERATE, WAKE, MemoryContext, group_phases
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.serialise import to_json
from hflow.planner.search import PLACEMENT, Evaluator, SearchProblem, free_settings, search
from hflow.planner.search.explore import divisions, spread_divisions
from hflow.planner.search.partition import connected_blocks, overlaps, spread_sets
from hflow.report.html.plan import render_page
from hflow.report.text.graph import plan_dot, plan_mermaid
from hflow.report.text.plan import render_plan
from hflow.runtime.simulation.simulate_plan import simulate_plan

ROOT = Path(__file__).parents[2]
LARGE = ("model@models.actor=qwen2.5-7b", "models.actor.path=null", "models.actor.gen.engine=vllm")
ENGINES_EVERYWHERE = "actor.gen=all:d4t2 actor,ref=0-3 critic=4-7"
ACTOR_EVERYWHERE = "actor,actor.gen=all critic=0-3 ref=4-7"
MEGATRON = (
    "models.actor.backend=megatron",
    "models.critic.backend=megatron",
    "+models.ref.backend=megatron",
    "nodes.actor_gen.max_tokens=1024",
    "batch=64",
    "workload.prompt=512",
    "workload.response_mean=512",
)


@cache
def compiled(placement: str, *overrides: str) -> Compiled:
    return compile_recipe(
        ROOT / "recipes" / "ppo.py", ["cluster=h100-1x8", f"placement={placement}", *overrides]
    )


def test_each_group_counts_the_replicas_on_it() -> None:
    plan = compiled(ACTOR_EVERYWHERE).plan
    for group, other in (("critic", "ref@infer"), ("ref", "critic@train")):
        rows = [row for row in plan.forecast.memory if row.group == group]
        names = {item.name.split()[0] for row in rows for item in row.resident}
        assert {"actor@train"} <= names
        assert other not in names
        assert "actor_train" in {row.phase for row in rows}


def test_an_engine_has_the_cache_that_its_fullest_group_leaves() -> None:
    """The critic's optimizer leaves less room than nothing but a reference model would."""
    overrides = ("models.critic.backend=megatron", "models.actor.backend=megatron", *LARGE)
    plan = compiled("actor.gen=all:d4t2 actor,critic=0-3:d1t4 ref=4-7", *overrides).plan
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
def test_the_simulated_step_takes_as_long_as_planned(placement: str) -> None:
    found = simulate_plan(compiled(placement, *LARGE, "models.critic.offload=all", "batch=64").plan, 16)
    assert found.plan.forecast.period is not None
    assert found.period == pytest.approx(found.plan.forecast.period.seconds, rel=0.05)
    assert {lane for lane, _ in found.run.idle} == {group.name for group in found.plan.groups}


def test_reports_name_all_groups_of_a_replica_and_of_a_node() -> None:
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


def self_play() -> tuple[Graph, PlanRequest]:
    """Two models of 7B that generate together and train at once, with everything free that may be chosen."""
    keys = [
        key
        for name in ("alice", "bob")
        for key in (
            f"model@models.{name}=qwen2.5-7b",
            f"models.{name}.path=null",
            f"models.{name}.backend=megatron",
            f"models.{name}.gen.engine=vllm",
        )
    ]
    sizes = (
        "cluster=h100-1x8",
        "placement=null",
        "batch=128",
        "workload.prompt=200",
        "workload.response_mean=400",
    )
    file = ROOT / "recipes" / "self_play.py"
    config, graph, _ = read_recipe(file, [*sizes, *keys])
    request = plan_request(config, graph, file)
    return graph, replace(request, free=frozenset({PLACEMENT}) | free_settings(request.models))


def layouts(compiled: Compiled) -> Mapping[str, str]:
    return {replica.name: str(replica.layout) for replica in compiled.plan.replicas}


@pytest.mark.long  # `test_search.py` compares searches of smaller problems with all plans, these among them
def test_engines_get_all_devices_where_that_is_fastest() -> None:
    """Both models generate on all devices, and each trains on half of them."""
    graph, request = self_play()
    found = search(graph, request)
    plan = compile_plan(graph, found.request)
    assert plan.replica("alice@gen").groups == plan.replica("bob@gen").groups
    assert len(plan.replica("alice@gen").groups) == 2
    assert set(plan.replica("alice@train").workers).isdisjoint(plan.replica("bob@train").workers)
    fastest = {row.why.split(":")[0]: row.seconds for row in found.candidates}
    assert found.seconds < 0.95 * fastest["all colocated"]
    assert plan.forecast.period is not None
    assert plan.forecast.period.seconds == pytest.approx(found.seconds, rel=0.03)
    assert max(row.total for row in plan.forecast.memory) <= (1 - MEMORY_MARGIN) * plan.cluster.memory_bytes


def test_groups_that_overlap_have_the_phases_of_their_replicas() -> None:
    """The search takes them from a plan with these replicas on one group and the others on another one.

    Where nodes without a model run makes no difference for memory.
    """
    graph, request = problem("ppo", "h100-1x8", "qwen2.5-1.5b")
    evaluator = Evaluator(SearchProblem(graph, request))
    found = [*divisions(evaluator), *spread_divisions(evaluator)]
    assert sum(map(overlaps, found)) == 17
    for blocks in found:
        plan = evaluator.problem.structure(blocks)
        groups = sorted(plan.groups, key=lambda group: group.devices)
        for block, group in zip(blocks, groups, strict=True):
            phases = group_phases(MemoryContext(plan, request), group)
            own = {row.node for row in plan.placements if set(row.replicas) & set(block)} | {GENERATE, WAKE}
            assert [row for row in phases if row[0] in own] == [
                row for row in evaluator.phases(block) if row[0] in own
            ], (blocks, block)


def test_layouts_on_sets_that_overlap_are_chosen() -> None:
    sets = "actor.gen=all actor,ref=0-3 critic=4-7"
    chosen = compiled(sets, *LARGE, *MEGATRON)
    assert {name for name, _ in chosen.plan.forecast.layouts} == set(layouts(chosen))
    assert chosen.plan.replica("actor@gen").workers[-1] == 7
    assert layouts(chosen)["actor@gen"] == "d2t4p1"
    assert chosen.plan.forecast.period is not None
    for engines in ("d8t1", "d4t2"):
        other = compiled(sets.replace("all", f"all:{engines}"), *LARGE, *MEGATRON).plan.forecast
        assert other is not None
        assert other.period is not None
        assert chosen.plan.forecast.period.seconds < 1.01 * other.period.seconds, "as far as a search goes"


def test_an_engine_in_several_groups_may_leave_devices_unused() -> None:
    """Seven devices have no tensor ranks, but six have."""
    keys = ("cluster=a100-40g-1x16", "model@models.actor=qwen2.5-14b", *LARGE[1:], *MEGATRON)
    made = compile_recipe(
        ROOT / "recipes" / "grpo.py",
        [
            *(key for key in keys if "critic" not in key and "ref" not in key),
            "models.actor.offload=optimizer",
            "models.actor.tokens_per_microbatch=2048",
            "placement=actor.gen=0-6 actor=4-15:d1t4p3",
        ],
    )
    assert str(made.plan.replica("actor@gen").layout) == "d3t2p1"
    assert len(made.plan.replica("actor@gen").groups) == 2


def test_a_batch_smaller_than_the_groups_of_a_model_is_planned() -> None:
    keys = [
        f"{key}models.{name}{value}"
        for name in ("actor", "ref")
        for key, value in (("model@", "=qwen2.5-0.5b"), ("", ".path=null"))
    ]
    made = compile_recipe(
        ROOT / "recipes" / "dpo.py",
        [
            *("cluster=h100-1x2", "batch=1", *keys, "models.actor.backend=megatron"),
            *("placement=actor=0-1:d1t2p1 ref=0:d1t1p1",),
        ],
    )
    assert len(made.plan.replica("actor@train").groups) == 2


def test_the_order_of_given_devices_is_kept() -> None:
    """Tensor ranks on devices 0 and 8 would be on two machines."""
    devices = ("groups.a=[0,8,1,9]", "groups.b=[2,3,4,5,6,7]")
    groups = ("models.actor.gen.group=a", "models.actor.group=b", "models.actor.backend=megatron")
    made = compile_recipe(
        ROOT / "recipes" / "grpo.py", ["cluster=h100-2x8", "batch=64", *LARGE, *devices, *groups]
    )
    assert made.plan.replica("actor@gen").workers == (0, 8, 1, 9)
    assert not made.plan.unrunnable


def test_models_are_placed_around_sets_that_overlap() -> None:
    plan = compiled("actor,ref=0-3 critic=2-5", *LARGE, *MEGATRON).plan
    assert set(plan.replica("actor@train").workers) <= {0, 1, 2, 3}
    assert set(plan.replica("critic@train").workers) <= {2, 3, 4, 5}
    assert plan.replica("actor@gen").workers


@pytest.mark.parametrize("devices", [(), ("groups.a=[0,1,2,3]", "groups.b=[4,5,6,7]")])
def test_models_of_several_groups_use_the_devices_of_all_of_them(devices: tuple[str, ...]) -> None:
    groups = ('models.actor.gen.group="a,b"', "models.actor.group=a", "models.critic.group=b")
    plan = compiled("auto", *groups, *devices, *LARGE, *MEGATRON).plan
    actor, critic, engine = (plan.replica(n) for n in ("actor@train", "critic@train", "actor@gen"))
    assert len(engine.groups) == 2
    assert set(actor.groups).isdisjoint(critic.groups)
    assert set(engine.groups) == {*actor.groups, *critic.groups}
    if devices:
        assert set(actor.workers) <= {0, 1, 2, 3}
        assert set(critic.workers) <= {4, 5, 6, 7}


def test_groups_with_replicas_in_common_are_connected() -> None:
    assert connected_blocks((("a", "b"), ("c",), ("b", "d"), ("d", "e"))) == ((0, 2, 3), (1,))
    assert connected_blocks((("a",), ("b",))) == ((0,), (1,))
    assert not overlaps((("a",), ("b",)))
    assert overlaps((("a", "b"), ("b", "c")))


def test_replicas_that_may_be_in_all_groups() -> None:
    assert list(spread_sets(["a@train", "a@gen", "b@gen"])) == [
        ("a@train",),
        ("a@gen",),
        ("b@gen",),
        ("a@train", "a@gen"),
        ("a@gen", "b@gen"),
    ]
