"""A reward model in front of a `keep` works on groups as they arrive, on devices of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import ROOT, TINY, largest_difference, run, steps_of, weights_of

from hflow.runtime.ledger import audit
from hflow.runtime.ledger.query import count, select
from hflow.runtime.ledger.sample_history import read_history
from hflow.runtime.records.run_summary import RunSummary
from hflow.workers.ray.ray_actors import RayActors

RECIPE = ROOT / "tests/integration/recipes/rewarded.py"
ASKED = [*TINY, "+model@models.rm=tiny-qwen2", "models.rm.path=null", "batch=4", "steps=3"]
ASKED += [f"models.{model}.architecture.hidden_size=32" for model in ("actor", "rm")]
APART = ["workers=inproc", "cluster=cpu-1x2", "placement=actor=0 rm=1"]


def check(summary: RunSummary, least: float = 0.3) -> None:
    """All steps were trained, on groups whose spread is as the filter wants, scored by the model."""
    ledger = summary.directory / "ledger.sqlite"
    assert (summary.reason, len(steps_of(summary))) == ("done", 3)
    assert audit(ledger) == []
    assert summary.sample_ends["trained"] == 3 * 4 * 4
    spread = "max(reward) - min(reward)"
    trained = f"select {spread} from samples where end = 'trained' group by id / 4"
    assert count(ledger, f"exists ({trained} having {spread} <= {least})") == 0
    assert count(ledger, "end = 'refused' and node = 'has_spread' and reward is null") == 0
    assert all("rm_view/rm_score" in row for row in steps_of(summary))


def test_groups_are_kept_by_the_models_scores(tmp_path: Path) -> None:
    summary = run(RECIPE, tmp_path, *ASKED, *APART, "nodes.has_spread.least=0.3")
    check(summary)
    ledger = summary.directory / "ledger.sqlite"
    assert count(ledger, "end = 'refused' and node = 'has_spread'") > 0
    assert "rew_inf" in [made.node for made in read_history(ledger, "0").computed]


def test_scores_are_those_of_a_whole_batch(tmp_path: Path) -> None:
    """Without the filter the model runs by batch; with one that keeps all, as groups arrive."""
    by_batch = tmp_path / "rewarded.py"
    by_batch.write_text(RECIPE.read_text().replace("        has_spread,\n", ""))
    early = run(RECIPE, tmp_path / "early", *ASKED, *APART, "nodes.has_spread.least=-1.0")
    late = run(by_batch, tmp_path / "late", *ASKED, *APART)
    for ours, theirs in zip(steps_of(early), steps_of(late), strict=True):
        for name in ("actor_gen/reward", "actor_train/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
    assert largest_difference(weights_of(early), weights_of(late)) < 1e-5


def test_two_models_work_on_the_same_groups(tmp_path: Path) -> None:
    """One refused meanwhile is freed when both are done with it."""
    second = ["+model@models.other=tiny-qwen2", "models.other.path=null"]
    second += ["models.other.architecture.hidden_size=32", "workers=inproc", "cluster=cpu-1x3"]
    asked = [*ASKED, *second, "placement=actor=0 rm=1 other=2", "nodes.has_spread.least=0.3"]
    check(run(RECIPE.with_name("twice_rewarded.py"), tmp_path, *asked))


@pytest.mark.ray
@pytest.mark.parametrize(
    ("placement", "changes", "engines"),
    [
        pytest.param(
            "actor=0-1:d2 actor.gen=0-1:d2 rm=2-3:d2", [], {0, 1}, id="data", marks=pytest.mark.long
        ),
        pytest.param("actor=0 actor.gen=1 rm=2-3:t2", ["models.rm.backend=megatron"], {1}, id="tensor"),
    ],
)
def test_on_several_ranks_while_generation_runs_ahead(
    placement: str, changes: list[str], engines: set[int], tmp_path: Path, four_processes: RayActors
) -> None:
    """A group stays on the engine that it was sent to, and its scores come back there."""
    asked = [*ASKED, "cluster=cpu-1x4", f"placement={placement}", "schedule.max_staleness=2", *changes]
    summary = run(RECIPE, tmp_path, *asked, "nodes.has_spread.least=0.3", processes=four_processes)
    check(summary)
    homes: dict[int, set[int]] = {}
    for row in select(summary.directory / "ledger.sqlite").to_json():
        homes.setdefault(int(row["id"]) // 4, set()).add(row["worker"])
    assert all(len(workers) == 1 for workers in homes.values())
    assert set.union(*homes.values()) == engines
