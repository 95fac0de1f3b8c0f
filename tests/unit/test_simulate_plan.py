"""Plans on a virtual clock: against the planner's own period, by their seed, and what is refused."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from rich.cells import cell_len
from rich.console import Console

from hflow import launch
from hflow.base.errors import PlanError
from hflow.planner.plan.rows import Plan
from hflow.report.text.simulation import render_simulation
from hflow.runtime.simulation.simulate_plan import Simulation, simulate_plan, trained_part

RECIPES = Path(__file__).parents[2] / "recipes"
CALIBRATIONS = RECIPES.parent / "configs" / "hardware" / "calibrations"
LONG = ("workload.response_mean=20", "nodes.actor_gen.max_tokens=100", "nodes.eval_gen.max_tokens=100")
"""Responses long enough that generation and training take about as long."""
BALANCED = (*LONG, "workload.response_cv=1.2", "batch=16", "models.actor.gen.max_running=24")


def plan(name: str, *overrides: str) -> Plan:
    return launch.plan(RECIPES / f"{name}.py", overrides)


def printed(simulation: Simulation, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render_simulation(simulation))
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("grpo", ()),
        ("grpo", ("models.actor.gen.max_running=10",)),
        ("grpo_async", ("schedule.max_staleness=0", "batch=6")),
        ("grpo_async", ("cluster=cpu-1x3", "placement='actor=0 actor.gen=1-2:d2'", "batch=6", *LONG)),
        ("sft", ()),
    ],
)
def test_even_lengths_take_the_plans_period(name: str, overrides: tuple[str, ...], tmp_path: Path):
    """Slots that are no whole number of groups, too, and two engines for three groups each."""
    shipped = yaml.safe_load((CALIBRATIONS / "cpu.yaml").read_text())
    engines_alone = shipped | {"devices": ["cpu"], "sample_us": 0}
    (tmp_path / "alone.yaml").write_text(yaml.safe_dump(engines_alone))
    keys = ("workload.response_cv=0", "schedule.max_staleness=0", f"calibration={tmp_path / 'alone.yaml'}")
    made = plan(name, *keys, *overrides)
    assert made.forecast.period is not None
    # The speed changes in steps: a last wave with few samples may be 0.1 % off.
    assert simulate_plan(made, 16).period == pytest.approx(made.forecast.period.seconds, rel=1e-3)


def test_uneven_lengths_come_closer_to_the_limit_with_staleness():
    reached = []
    for eta in (0, 1, 4):
        found = simulate_plan(plan("grpo_async", *BALANCED, f"schedule.max_staleness={eta}"))
        assert found.limit == max(found.generation_alone, found.training_alone) <= found.period
        assert not found.in_turns
        assert max(found.run.staleness()) <= (found.plan.staleness_bound or 0) == eta
        reached.append(found.limit / found.period)
    assert reached[0] < reached[1] <= reached[2] * (1 + 1e-9)


def test_more_staleness_is_never_slower():
    """Samples of a batch that waits for its longest ones run as fast as their number allows."""
    sizes = ("workload.response_mean=200", "workload.response_cv=1", "workload.prompt=20")
    tokens = ("nodes.actor_gen.max_tokens=1000", "nodes.eval_gen.max_tokens=1000")
    devices = ("cluster=h100-1x8", "placement='actor=0-3 actor.gen=4-7:d4'", "models.actor.gen.engine=vllm")
    model = ("model@models.actor=qwen2.5-1.5b", "models.actor.path=null", "batch=32")
    periods = [
        simulate_plan(
            plan("grpo_async", *sizes, *tokens, *devices, *model, f"schedule.max_staleness={eta}"), 16
        )
        for eta in (0, 1, 2, 4)
    ]
    seconds = [simulation.period for simulation in periods]
    assert all(later <= earlier * 1.01 for earlier, later in pairwise(seconds))
    assert seconds[-1] < 0.8 * seconds[0]


@pytest.mark.first(4)
@pytest.mark.parametrize("eta", [0, 2])
@pytest.mark.parametrize(
    ("name", "devices", "in_turns"),
    [
        ("grpo", ["cluster=cpu-1x1"], ["all"]),
        ("ppo", ["cluster=cpu-1x1"], ["all"]),
        ("ppo", ["cluster=cpu-1x2", "placement='actor=0 critic=1'"], ["actor"]),
        ("ppo", ["cluster=cpu-1x3", "placement='actor=0 critic=1 actor.gen=2'"], []),
        ("grpo_async", ["cluster=cpu-1x2"], []),
    ],
)
def test_no_simulated_run_is_faster_than_the_limit(
    name: str, devices: list[str], in_turns: list[str], eta: int
):
    """The node of PPO that starts at step 10 runs in these 16 steps from the first one on.

    With staleness, a part of what is generated in the measured steps is trained after them.
    """
    few = (*BALANCED, "models.actor.gen.max_running=8", f"schedule.max_staleness={eta}")
    found = simulate_plan(plan(name, *few, *devices), 16)
    assert found.limit <= found.period * (1.005 if eta else 1 + 1e-9)
    assert [group for group, _ in found.in_turns] == in_turns


def test_only_the_nodes_of_an_engines_own_devices_wait_for_it():
    apart = ("cluster=cpu-1x2", "placement='actor=0 critic=1'", "nodes.actor_train.after=0")
    found = simulate_plan(plan("ppo", *LONG, "batch=16", *apart), 16)
    forecast, orders = found.plan.forecast, dict(found.plan.schedule.orders)
    seconds = {row.node: row.seconds for row in forecast.times}
    own = sum(seconds[node] for node in orders["actor"] if not node.startswith("save."))
    assert found.in_turns == (("actor", pytest.approx(found.generation_alone + own)),)
    assert found.limit < found.generation_alone + found.training_alone
    text = " ".join(printed(found, 100).replace("│", "").split())
    assert "the largest of: generation alone" in text
    assert "generation and training in turns on the devices of actor" in text


def test_evaluations_are_left_out():
    schedule = plan("grpo").schedule
    assert {stream.name for stream in schedule.streams} > {schedule.streams[0].name}
    part = trained_part(schedule)
    assert part.streams == schedule.streams[:1]
    assert {node.stream for node in part.nodes} == {part.streams[0].name}
    assert {name for _, names in part.orders for name in names} <= {node.name for node in part.nodes}


def test_the_figures_are_decided_by_the_seed():
    made = plan("grpo_async", *BALANCED)
    first, again, other = (json.dumps(simulate_plan(made, 16, seed).to_json()) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_at_most_the_plans_steps_are_simulated_by_default():
    made = plan("grpo", "steps=7", "workload.response_cv=0")
    assert simulate_plan(made).num_steps == 7


@pytest.mark.parametrize("width", [60, 100, 140])
def test_the_report_has_the_figures_of_the_simulation(width: int):
    found = simulate_plan(plan("grpo_async", *BALANCED))
    text = printed(found, width)
    assert max(map(cell_len, text.splitlines())) <= width
    for words in ("grpo_async", "plan's period", "limit", "Staleness", "Some steps", "idle", "actor_train"):
        assert words in text
    for lag, num in found.run.staleness().items():
        assert f"  {lag}  " in text
        assert f"{num:,}" in text
    assert found.run.interruptions > 0
    assert f"{found.run.interruptions:,}" in text


def test_the_report_of_a_written_stream_has_no_staleness():
    text = printed(simulate_plan(plan("sft"), 16))
    assert "nothing is generated" in text
    assert "Staleness ━" not in text


def test_plans_without_seconds_are_refused():
    unknown = plan("grpo", "models.actor.architecture=null", "models.actor.path=somewhere")
    with pytest.raises(PlanError, match=r"size of actor is unknown. Set models\.actor\.path to a check"):
        simulate_plan(unknown)
    with pytest.raises(PlanError, match="3 steps are too few"):
        simulate_plan(plan("grpo"), 3)
