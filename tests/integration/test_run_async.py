"""Asynchronous runs keep their staleness bound; with staleness 0 they equal the synchronous run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, TINY, largest_difference, run, steps_of, weights_of

from hflow.base.errors import PlanError
from hflow.runtime.ledger import audit
from hflow.runtime.records.run_summary import RunSummary
from hflow.workers.ray.ray_actors import RayActors

pytestmark = pytest.mark.ray

GRPO = ["models.actor.path=null", "batch=4", "data.heldout.limit=6", "nodes.eval_gen.every=3"]
GRPO += ["models.actor.optim.warmup_steps=0", "nodes.actor_gen.temperature=1.2"]
PPO = [*GRPO, "batch=16", "nodes.actor_train.after=2", "models.critic.optim.warmup_steps=0"]


def plan_of(summary: RunSummary) -> Mapping[str, Any]:
    plan: Mapping[str, Any] = json.loads((summary.directory / "plan.json").read_text())["plan"]
    return plan


def assert_certified(summary: RunSummary, num_steps: int) -> list[dict[str, Any]]:
    """Every step trained whole, in order, and on nothing older than the plan says."""
    rows = steps_of(summary)
    assert (summary.reason, [row["step"] for row in rows]) == ("done", list(range(1, num_steps + 1)))
    bound = plan_of(summary)["staleness_bound"]
    for row in rows:
        assert row["staleness/max"] <= bound
        parts = row["staleness/in_flight"] + row["staleness/in_queue"]
        assert row["staleness/mean"] == pytest.approx(parts)
        shares = [value for name, value in row.items() if name.startswith("staleness/lag_")]
        assert sum(shares) == pytest.approx(1)
        assert [name for name, value in row.items() if value is None or not math.isfinite(value)] == []
    return rows


def test_zero_staleness_equals_the_synchronous_run(tmp_path: Path, two_processes: RayActors) -> None:
    """The engine apart, over Ray, its weights by disk; and on the trainer's device, in this process."""
    options = [*GRPO, "steps=3", "schedule.max_staleness=0"]
    disk = "models.actor.gen.transport=disk"
    apart = run("recipes/grpo_async.py", tmp_path / "apart", *options, disk, processes=two_processes)
    assert plan_of(apart)["weights"][0]["transport"] == "disk"
    assert not (apart.directory / "weights").exists()
    together = ["placement=null", "cluster=cpu-1x1", "workers=inproc"]
    shared = run("recipes/grpo_async.py", tmp_path / "shared", *options, *together)
    for ours, theirs in zip(assert_certified(apart, 3), assert_certified(shared, 3), strict=True):
        assert ours["staleness/max"] == theirs["staleness/max"] == 0
        for name in ("actor_train/loss", "actor_train/grad_norm", "actor_gen/reward"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
    assert largest_difference(weights_of(apart), weights_of(shared)) < 1e-5


def test_generation_runs_ahead_within_the_staleness_bound(tmp_path: Path, two_processes: RayActors) -> None:
    summary = run("recipes/grpo_async.py", tmp_path, *GRPO, "steps=8", processes=two_processes)
    rows = assert_certified(summary, 8)
    assert_published_in_order(summary)
    assert max(row["staleness/max"] for row in rows) > 0
    assert rows[-1]["rollout/accepted"] >= 8 * 4
    assert all(0 <= row["rollout/version"] <= row["step"] for row in rows)
    assert all(0 <= row["busy/trainers"] <= 1.01 and row["busy/engines"] >= 0 for row in rows)
    for row in rows:  # the engine alone where tokens have the trainer's version, else its part of the whole
        assert 0 < row["actor_train/behav_gap"] <= row["actor_train/behav_gap.max"]
        assert ("actor_train/engine_gap" in row) == (row["actor_train/engine_tokens"] > 0)
        assert row.get("actor_train/engine_gap.max", 0) < 1e-4
    assert rows[0]["actor_train/engine_tokens"] > 0


def assert_published_in_order(summary: RunSummary) -> None:
    """Each version is published on the trainer's device between the update that makes it and the next one.

    It may come after nodes that only read it: it waits until the engine has loaded the one before.
    """
    events = json.loads((summary.directory / "trace.json").read_text())["traceEvents"]
    spans = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    done = [(span["name"], span["args"].get("step", span["args"].get("version"))) for span in spans]
    published = [version for name, version in done if name == "publish actor@gen"]
    assert published[:2] == [0, 1]
    for version in published[1:]:
        order = [("actor_train", version), ("publish actor@gen", version), ("actor_train", version + 1)]
        places = [done.index(key) for key in order if key in done]
        assert places == sorted(places)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    "changes",
    [
        ["schedule.interrupt=false"],
        ["schedule.sync_every=2", "schedule.max_staleness=1"],
        ["schedule.max_staleness=0.5"],
        ["schedule.max_staleness=4", "schedule.drop_older_than=1", "schedule.queue=8"],
        ["nodes.actor_train.prox=loglinear"],
        ["nodes.actor_train.prox=metrics", "nodes.actor_train.over_cap=truncate"],
    ],
)
def test_schedules_and_losses(changes: list[str], tmp_path: Path) -> None:
    inproc = ["workers=inproc", *GRPO, "steps=6"]
    assert_certified(run("recipes/grpo_async.py", tmp_path, *inproc, *changes), 6)


def test_groups_move_to_the_less_loaded_engine(tmp_path: Path) -> None:
    """Their tokens come along: segments of several versions, and each sample has one end."""
    engines = ["cluster=cpu-1x3", "placement=actor=0 actor.gen=1-2:d2", "schedule.max_staleness=2"]
    asked = ["workers=inproc", *TINY[:-1], "batch=24", "steps=20", "nodes.actor_gen.temperature=0.2"]
    asked += ["models.actor.architecture.max_position_embeddings=256", "models.actor.gen.max_model_len=256"]
    summary = run(ROOT / "tests/integration/recipes/uneven.py", tmp_path, *asked, *engines)
    rows = assert_certified(summary, 20)
    assert sum(row.get("rollout/moved", 0) for row in rows) > 0
    assert audit(summary.directory / "ledger.sqlite") == []


def test_a_critic_with_asynchronous_engines(tmp_path: Path, two_processes: RayActors) -> None:
    rows = assert_certified(
        run("recipes/ppo_async.py", tmp_path, *PPO, "steps=5", processes=two_processes), 5
    )
    assert ["actor_train/loss" in row for row in rows] == [False, False, True, True, True]
    assert all(row["critic_train/grad_norm"] > 0 for row in rows)


def test_a_run_without_an_age_rule_has_no_staleness_bound(tmp_path: Path) -> None:
    options = ["workers=inproc", *GRPO, "steps=3", "schedule.age_rule=false"]
    summary = run("recipes/grpo_async.py", tmp_path, *options)
    assert plan_of(summary)["staleness_bound"] is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ["schedule.queue=3"],
            r"schedule.queue is 3, but a batch has 4 groups; set schedule.queue to 4 or more",
        ),
        (
            ["schedule.sync_every=3", "schedule.drop_older_than=1"],
            r"schedule.drop_older_than is 1, .*set schedule.drop_older_than to 2",
        ),
        (
            ["schedule.max_concurrent=4"],
            r"schedule.max_concurrent is 4, but a group of 'actor_gen' has 8 samples",
        ),
    ],
)
def test_impossible_schedules_are_refused(change: list[str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=reason):
        run("recipes/grpo_async.py", tmp_path, *GRPO, *change)
