"""Layouts that the user left open: the fastest that fit, and the stated reason."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from hflow.base.errors import PlanError
from hflow.launch.planning.compile import compile_recipe
from hflow.planner.plan.rows import Plan
from hflow.report.text.plan import render_plan

GRPO = Path(__file__).parents[2] / "recipes" / "grpo.py"
LARGE = (
    "models.actor.path=null",
    "models.actor.gen.engine=vllm",
    "models.actor.dtype=bf16",
    "models.actor.activation_checkpointing=true",
    "models.actor.tokens_per_microbatch=4096",
)

HERE = "placement='actor,actor.gen=all'"
"""Everything on all devices: only layouts are left open."""


def plan_of(model: str, cluster: str, *keys: str, backend: str = "megatron") -> Plan:
    chosen = (f"model@models.actor={model}", f"cluster={cluster}", f"models.actor.backend={backend}")
    return compile_recipe(GRPO, (*LARGE, *chosen, *keys)).plan


def layout_of(plan: Plan) -> str:
    return str(plan.replica("actor@train").layout)


def why(plan: Plan, role: str = "train") -> dict[str, str]:
    return {name: reason for name, reason in plan.forecast.layouts if name.endswith(role)}


def test_data_ranks_alone_where_they_are_fastest() -> None:
    plan = plan_of("qwen2.5-0.5b", "h100-1x8", HERE)
    assert (layout_of(plan), why(plan)) == ("d8t1p1", {"actor@train": "data ranks alone are fastest"})


def test_more_tensor_ranks_where_data_ranks_do_not_fit() -> None:
    plan = plan_of("qwen2.5-14b", "h100-1x8", HERE)
    assert plan.replica("actor@train").layout.data < 8
    with pytest.raises(PlanError, match=r"wake needs 105\.5 GiB"):
        plan_of(
            *("qwen2.5-14b", "h100-1x8", "placement='actor=all:d4t2 actor.gen=all:d8'"),
            "models.actor.offload=none",
        )
    assert re.fullmatch(r"with d\dt\dp\d \w+ would need [\d.]+ GiB of 79\.6", why(plan)["actor@train"])


def test_no_tensor_ranks_span_machines() -> None:
    plan = plan_of("qwen2.5-72b", "h100-4x8", HERE)
    assert max(plan.replica(name).layout.tensor for name in ("actor@train", "actor@gen")) <= 8


def test_an_engine_has_tensor_ranks_where_its_cache_needs_them() -> None:
    """61 GiB of weights fit beside a small cache, but not beside 16 GiB for one sequence of 65,536 tokens."""
    train, gen = list(range(16)), list(range(16, 24))
    apart = (f"groups={{train:{train},gen:{gen}}}", "models.actor.group=train", "models.actor.gen.group=gen")
    plan = plan_of("qwen2.5-32b", "h100-3x8", *apart, "models.actor.gen.max_model_len=65536")
    assert plan.replica("actor@gen").layout.tensor > 1
    assert "actor@gen" in why(plan, "gen")


def test_a_model_that_fits_nowhere_is_refused_with_a_suggestion() -> None:
    with pytest.raises(PlanError, match=r"no placement fits into memory\. Set cluster=h100-[24]x8 \("):
        plan_of("llama-3.1-70b", "h100-1x8")


def test_requested_layouts_are_kept() -> None:
    plan = plan_of("qwen2.5-7b", "h100-1x8", "placement='actor=all:d2t4 actor.gen=all'")
    assert (layout_of(plan), why(plan)) == ("d2t4p1", {})


def test_a_backend_without_tensor_ranks_has_its_data_axis() -> None:
    plan = plan_of("qwen2.5-7b", "h100-1x8", HERE, backend="torch")
    assert (layout_of(plan), why(plan)) == ("d8t1p1", {})


def test_unknown_sizes_are_said() -> None:
    plan = plan_of("qwen2.5-7b", "h100-1x8", "models.actor.architecture=null")
    assert layout_of(plan) == "d8t1p1"
    assert why(plan) == {"actor@train": "data ranks alone, as its sizes are unknown"}


def test_the_report_says_why() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_plan(plan_of("qwen2.5-14b", "h100-1x8", HERE)))
    assert re.search(r"actor@train is d\dt\dp\d: with d", console.export_text())


def test_weights_are_replicated_between_machines_where_memory_allows() -> None:
    sharded = "models.actor.zero_stage=3"  # else gradients are summed once anyway
    plan = plan_of("qwen2.5-7b", "h100-2x8", HERE, sharded, backend="torch")
    assert layout_of(plan) == "d16t1p1r2"
    assert re.fullmatch(r"\d+ % faster than d16t1p1", why(plan)["actor@train"])
    engines = "placement='actor=all actor.gen=all:d4t8'"
    too_large = plan_of(
        "qwen2.5-72b", "h100-4x8", engines, "models.actor.offload=none", sharded, backend="torch"
    )
    assert layout_of(too_large) == "d32t1p1"
    assert re.fullmatch(r"with d32t1p1r2 \w+ would need [\d.]+ GiB of 79\.6", why(too_large)["actor@train"])
