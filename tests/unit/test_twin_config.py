"""The configuration that the runs of a twin share, and what of two runs is compared."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hflow.launch.planning.compile import compile_recipe
from hflow.launch.planning.read_recipe import read_recipe
from hflow.launch.running.twin import (
    comparable_config,
    compare_with_twin,
    configuration,
    describe_changes,
    reference_config,
)
from hflow.planner.plan.rows import Plan
from hflow.report.text.twin import TwinResult
from hflow.runtime.records.run_summary import RunSummary

PPO = Path(__file__).parents[2] / "recipes" / "ppo.py"
VLLM = ["models.actor.path=null", "models.actor.gen.engine=vllm", "models.actor.gen.cache_gib=1"]


def twin_plan(*overrides: str) -> Plan:
    config, graph, _ = read_recipe(PPO, [*VLLM, *overrides])
    comparable = comparable_config(config, graph, 2, "out")
    return compile_recipe(PPO, config=dataclasses.replace(comparable, name="twin")).plan


def placed(plan: Plan) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    return {r.name: (r.backend, str(r.layout), r.workers) for r in plan.replicas}


def test_an_engine_that_quantises_becomes_one_that_does_not() -> None:
    keys = [f"models.actor.gen.{key}=fp8" for key in ("quantization", "cache_dtype")]
    assert twin_plan(*keys, "models.actor.dtype=bf16").unrunnable == ()
    config, graph, _ = read_recipe(PPO, [*VLLM, *keys])
    assert "actor generates in fp32 (gen.cache_dtype=fp8)" in describe_changes(graph, config)


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


@pytest.mark.parametrize(("steps", "saved"), [(2, 1), (3, 1), (4, 2), (11, 5)])
def test_the_reference_keeps_the_weights_from_which_change_is_counted(steps: int, saved: int) -> None:
    overrides = ["keep_checkpoints=1", "keep_best=actor_gen/reward", "save_every=5"]
    config, graph, _ = read_recipe(PPO, overrides)
    reference = reference_config(comparable_config(config, graph, steps, "out"), graph)
    assert (reference.save_every, reference.keep_checkpoints, reference.keep_best) == (saved, None, None)


def saved_run(path: Path, losses: list[float | None], weights: list[torch.Tensor]) -> RunSummary:
    rows = [{"step": step, "learn/loss": loss} for step, loss in enumerate(losses, start=1)]
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, tensor in enumerate(weights, start=1):
        model = path / "checkpoints" / f"step-{step}" / "actor"
        model.mkdir(parents=True)
        save_file({"w": tensor}, model / "model.safetensors")
    (path / "checkpoints" / "latest").symlink_to(f"step-{len(weights)}")
    return RunSummary("twin", path, len(losses), 1.0, "done", "", {})


def compared(tmp_path: Path, ours: RunSummary, losses: list[float | None], last: torch.Tensor) -> TwinResult:
    return compare_with_twin(ours, saved_run(tmp_path / "twin", losses, [last]), "d2")


START, END = torch.zeros(4), torch.tensor([3.0, 4.0, 0.0, 0.0])


def test_the_weights_of_a_run_whose_first_step_is_kept_are_compared(tmp_path: Path) -> None:
    ours = saved_run(tmp_path / "reference", [1.0], [START, END / 2, END])
    (pair,) = compared(tmp_path, ours, [1.0], END + 0.5).weights
    assert pair.change == pytest.approx(1.0 / 5.0)  # the norm of four halves, of a change by 5


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("side", ["reference", "twin", "both"])
def test_weights_that_are_not_finite_differ(value: float, side: str, tmp_path: Path) -> None:
    broken = torch.tensor([value, 4.0, 0.0, 0.0])
    ours = saved_run(tmp_path / "reference", [1.0], [START, END if side == "twin" else broken])
    result = compared(tmp_path, ours, [1.0], END if side == "reference" else broken)
    assert [pair.model for pair in result.failed_weights] == ["actor"]


def test_weights_of_other_shapes_differ(tmp_path: Path) -> None:
    ours = saved_run(tmp_path / "reference", [1.0], [START, torch.ones(4)])
    assert not compared(tmp_path, ours, [1.0], torch.ones(1)).is_equal  # which broadcasting would hide


def test_a_step_that_is_not_finite_does_not_hide_the_others(tmp_path: Path) -> None:
    ours = saved_run(tmp_path / "reference", [None, 1.0], [START, END])
    result = compared(tmp_path, ours, [None, 2.0], END)
    assert [pair.step for pair in result.failed_metrics] == [1, 2]
