"""Runs with vLLM: two tensor ranks on the trainers' devices, and an engine on a device of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import run, steps_of

from hflow.runtime.ledger import audit
from hflow.workers.ray.ray_actors import RayActors

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SMALL = ["models.actor.path=null", "models.actor.gen.engine=vllm", "batch=8", "steps=3"]
SMALL += ["models.actor.optim.warmup_steps=0", "data.heldout.limit=6", "nodes.eval_gen.every=3"]
LONG = ["nodes.actor_gen.max_tokens=48", "schedule.max_staleness=2"]


def test_two_tensor_ranks_take_turns_with_sharded_trainers(tmp_path: Path, two_processes: RayActors) -> None:
    """Ranks of an engine receive other boxes than the trainers' ranks hold."""
    layouts = ["cluster=cpu-1x2", "models.actor.layout=d2", "models.actor.gen.layout=d1t2"]
    summary = run("recipes/grpo.py", tmp_path, *SMALL, *layouts, processes=two_processes)
    rows = steps_of(summary)
    assert (summary.reason, [row["step"] for row in rows]) == ("done", [1, 2, 3])
    for row in rows:
        assert 0 < row["actor_train/engine_gap"] < 1e-4
        assert row["actor_train/engine_gap.max"] < 1e-3


def test_weights_arrive_while_an_engine_generates(tmp_path: Path, two_processes: RayActors) -> None:
    summary = run("recipes/grpo_async.py", tmp_path, *SMALL, *LONG, processes=two_processes)
    rows = steps_of(summary)
    assert (summary.reason, [row["step"] for row in rows]) == ("done", [1, 2, 3])
    assert max(row["staleness/max"] for row in rows) > 0
    assert audit(summary.directory / "ledger.sqlite") == []
