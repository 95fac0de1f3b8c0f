"""Runs that end anywhere continue from their last checkpoint, as if they had not ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import TINY, largest_difference, run, weights_of

from hflow import launch
from hflow.errors import ConfigError, PlanError, RunError
from hflow.launch.run_recipe import resume_run
from hflow.report.summary import RunSummary
from hflow.runtime.ledger.audit import audit

RECIPE = "tests/integration/recipes/resumed.py"
COMMON = [
    *TINY,
    "+data@data.heldout=addition",
    "data.heldout.limit=6",
    "data.train.limit=32",
    "nodes.eval_gen.max_tokens=4",
    "models.actor.optim.lr=1e-3",
    "models.critic.optim.lr=1e-3",
    "steps=5",
    "batch=8",
    "save_every=1",
    "keep_checkpoints=null",
]
INPROC = ["workers=inproc", "cluster=cpu-1x1"]
TIMES = ("time/", "busy/", "tokens_per_second", "samples_per_second", "rollout/")


def interrupted(summary: RunSummary, directory: Path, steps: int) -> Path:
    """Return a copy of a run in which everything after some step is not saved."""
    copy = directory / "interrupted"
    shutil.copytree(summary.directory, copy, symlinks=True)
    for path in (copy / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > steps:
            shutil.rmtree(path)
    return copy


def results(summary: RunSummary) -> dict[int, dict[str, Any]]:
    """Return step -> the metrics that do not measure time. The later row of a step counts."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (summary.directory / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        kept = {name: value for name, value in row.items() if not any(time in name for time in TIMES)}
        rows[row["step"]] = rows.get(row["step"], {}) | kept
    return rows


def ends_of(summary: RunSummary) -> list[dict[str, Any]]:
    """Return what happened to each sample, without times."""
    rows = launch.samples(str(summary.directory)).to_json()
    return [{name: value for name, value in row.items() if not name.endswith("_at")} for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    return run(RECIPE, tmp_path_factory.mktemp("undisturbed"), *COMMON, *INPROC)


def test_a_resumed_run_equals_the_undisturbed_one(undisturbed: RunSummary, tmp_path: Path):
    copy = interrupted(undisturbed, tmp_path, 2)
    resumed = resume_run(str(copy), live=False)
    assert (resumed.reason, resumed.steps, resumed.directory) == ("done", 5, copy)
    assert results(resumed) == results(undisturbed)
    for model in ("actor", "critic"):
        assert largest_difference(weights_of(resumed, model), weights_of(undisturbed, model)) == 0
    assert resumed.samples == undisturbed.samples
    assert audit(copy / "ledger.sqlite") == []
    assert ends_of(resumed) == ends_of(undisturbed)


def test_the_last_checkpoint_of_a_finished_run_continues_with_more_steps(
    undisturbed: RunSummary, tmp_path: Path
):
    copy = interrupted(undisturbed, tmp_path, 5)
    with pytest.raises(ConfigError, match="has completed its 5 steps; to continue it, set more"):
        resume_run(str(copy), live=False)
    longer = resume_run(str(copy), ["steps=6", "keep_checkpoints=1"], live=False)
    assert (longer.reason, longer.steps) == ("done", 6)
    assert [path.name for path in (copy / "checkpoints").glob("step-*")] == ["step-6"]
    before = results(undisturbed)
    assert {step: row for step, row in results(longer).items() if step < 5} == {
        step: row for step, row in before.items() if step < 5
    }
    assert audit(copy / "ledger.sqlite") == []


@pytest.mark.parametrize("name", ["actor/model.safetensors", "state.json", "critic/shards/shards.json"])
def test_a_damaged_checkpoint_is_refused_and_an_older_one_can_be_named(
    undisturbed: RunSummary, tmp_path: Path, name: str
):
    copy = interrupted(undisturbed, tmp_path, 3)
    path = copy / "checkpoints" / "step-3" / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match=rf"step-3 is damaged: {name} does not have the content"):
        resume_run(str(copy), live=False)
    path.unlink()
    with pytest.raises(RunError, match=rf"step-3 is damaged: {name} is missing"):
        resume_run(str(copy), live=False)
    with pytest.raises(PlanError, match="cannot resume: setting seed: 0 -> 1"):
        resume_run(str(copy / "checkpoints" / "step-2"), ["seed=1"], live=False)


def test_a_run_that_still_goes_on_is_not_resumed(undisturbed: RunSummary, tmp_path: Path):
    from hflow.runtime.execution.run_directory import RunDirectory

    copy = interrupted(undisturbed, tmp_path, 2)
    with RunDirectory(copy).locked(), pytest.raises(ConfigError, match=r"is still going \(process \d+\)"):
        resume_run(str(copy), live=False)
