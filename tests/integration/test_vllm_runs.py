"""Runs on Ray workers whose engines are vLLM's: with two tensor ranks, and over each transport of a CPU."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from runs import run, steps_of

from hflow.backends.interface import ENGINE_GAP_MAX
from hflow.report.summary import RunSummary
from hflow.runtime.ledger import audit
from hflow.workers.ray.ray_actors import RayActors

pytestmark = pytest.mark.ray

GRPO = ["models.actor.gen.engine=vllm", "models.actor.path=null", "nodes.eval_gen.after=99"]
GRPO += ["models.actor.optim.warmup_steps=0", "models.actor.optim.lr=1e-3"]
GRPO += ["models.actor.optim.weight_decay=50"]
"""Each step makes all weights 5 % smaller."""
LONG = ["batch=2", "steps=8", "models.actor.architecture.vocab_size=512", "nodes.actor_gen.max_tokens=240"]
LONG += ["models.actor.architecture.max_position_embeddings=256", "models.actor.gen.max_model_len=256"]
"""Random weights end one answer in 512 tokens, so requests run at every sync."""


def rows_of(summary: RunSummary, query: str) -> Sequence[tuple[Any, ...]]:
    database = sqlite3.connect(summary.directory / "ledger.sqlite")
    try:
        return database.execute(query).fetchall()
    finally:
        database.close()


def assert_versions(summary: RunSummary, num_steps: int) -> None:
    """Every step is done, and the engine held other weights in each version that it loaded."""
    assert (summary.reason, summary.steps) == ("done", num_steps)
    assert audit(summary.directory / "ledger.sqlite") == []
    digests = dict(rows_of(summary, "SELECT version, digest FROM commits ORDER BY seq"))
    assert len(set(digests.values())) == len(digests) > 1
    assert list(digests) == sorted(digests)


def test_two_tensor_ranks_on_the_trainers_devices(tmp_path: Path, two_processes: RayActors) -> None:
    """The engine's log-probs are the trainer's in every step, so it holds the weights that were trained."""
    options = [*GRPO, "batch=4", "steps=3", "models.actor.layout=d2", "models.actor.gen.layout=t2"]
    summary = run("recipes/grpo.py", tmp_path, *options, processes=two_processes)
    assert_versions(summary, 3)
    for row in steps_of(summary):
        assert 0 < row[f"actor_train/{ENGINE_GAP_MAX.suffix}"] < 1e-4


@pytest.mark.parametrize("transport", ["collective", "shared", "disk", "store"])
def test_a_sync_in_the_middle_of_answers(transport: str, tmp_path: Path, two_processes: RayActors) -> None:
    """Interrupted answers keep their tokens and continue with the new weights; they are trained."""
    options = [*GRPO, *LONG, f"models.actor.gen.transport={transport}"]
    summary = run("recipes/grpo_async.py", tmp_path, *options, processes=two_processes)
    assert_versions(summary, 8)
    for row in steps_of(summary):  # tokens of other weights, which are 5 % apart, are not compared
        assert row.get(f"actor_train/{ENGINE_GAP_MAX.suffix}", 0) < 1e-4
    mixed = rows_of(
        summary,
        """
        SELECT samples.id, samples.tokens, sum(segments.tokens) FROM samples
        JOIN segments ON segments.sample = samples.id
        JOIN streams ON segments.stream = streams.id AND streams.name = samples.stream
        WHERE samples.stream = 'actor_gen' AND samples.end = 'trained' AND oldest < newest
        GROUP BY samples.id""",
    )
    assert mixed
    assert all(tokens == kept for _, tokens, kept in mixed)
