"""Runs whose episodes return one to three trajectories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from runs import TINY, largest_difference, run, weights_of

from hflow.launch.running.run_recipe import resume
from hflow.runtime.ledger.audit import audit
from hflow.runtime.ledger.schema import reading
from hflow.runtime.records.run_summary import RunSummary
from hflow.runtime.saving.run_directory import read_metrics
from hflow.workers.ray.ray_actors import RayActors

RECIPE = "tests/integration/recipes/branching.py"
COMMON = [
    *(setting for setting in TINY if "actor_gen" not in setting),
    "+model@models.ref=tiny-qwen2",
    "+data@data.heldout=addition",
    "models.ref.path=null",
    "data.heldout.limit=4",
    "nodes.agent.max_tokens=4",
    "nodes.eval_agent.max_tokens=4",
    "models.actor.optim.lr=1e-3",
    "models.actor.tokens_per_microbatch=24",
    "steps=3",
    "batch=4",
    "save_every=1",
    "keep_checkpoints=null",
    "report.samples=16",
]
INPROC = ["workers=inproc", "cluster=cpu-1x1"]


@pytest.fixture(scope="module")
def branching(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    return run(RECIPE, tmp_path_factory.mktemp("branching"), *COMMON, *INPROC)


def families(summary: RunSummary) -> dict[int, list[tuple[Any, ...]]]:
    """Return sample -> length, tokens and turns of its trajectories."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    with reading(summary.directory / "ledger.sqlite") as database:
        for sample, *counts in database.execute(
            "SELECT sample, length, tokens, turns FROM trajectories WHERE stream = 0 ORDER BY sample, number"
        ):
            found.setdefault(sample, []).append(tuple(counts))
    return found


def losses(summary: RunSummary) -> list[dict[str, Any]]:
    names = ("actor_train/loss", "actor_train/num_tokens", "actor_train/grad_norm", "agent/reward")
    rows = read_metrics(summary.directory / "metrics.jsonl")
    return [{name: row[name] for name in names} for row in rows if "actor_train/loss" in row]


def test_the_ledger_has_the_trajectories_of_each_sample(branching: RunSummary, hflow: CommandLine):
    ledger = branching.directory / "ledger.sqlite"
    assert audit(ledger) == []
    assert branching.sample_ends["trained"] == 3 * 4 * 4
    members = families(branching)
    assert {len(each) for each in members.values()} == {1, 2, 3}
    with reading(ledger) as database:
        tokens = dict(database.execute("SELECT sample, tokens FROM finished WHERE stream = 0"))
    assert {sample: sum(each[1] for each in family) for sample, family in members.items()} == tokens
    trained = [row["actor_train/num_tokens"] for row in losses(branching)]
    assert sum(trained) == sum(tokens.values())
    for family in members.values():  # the first turn is learned in the first trajectory only
        assert [turns for *_, turns in family] == [2, 1, 1][: len(family)]

    sample, family = next(item for item in members.items() if len(item[1]) == 3)
    shown = hflow("why", str(branching.directory), str(sample)).output
    length, (second_length, second_tokens, _) = sum(length for length, *_ in family), family[1]
    assert f"tokens in 4 turns, 3 trajectories ({length} with the prompt)" in shown
    assert f"trajectory 2: {second_tokens} tokens ({second_length} with the prompt)" in shown


def test_the_text_of_a_sample_has_all_trajectories(branching: RunSummary):
    members = families(branching)
    for path in (branching.directory / "samples").glob("step-[12].jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["stream"] == "agent":
                prompts = [turn for turn in row["turns"] if not turn["trained"] and "<bos>" in turn["text"]]
                assert len(prompts) == len(members[row["id"]])
                learned = sum(len(turn.get("tokens", ())) for turn in row["turns"])
                assert learned == sum(tokens for _, tokens, _ in members[row["id"]])


def test_a_resumed_run_equals_the_undisturbed_one(branching: RunSummary, tmp_path: Path):
    copy = tmp_path / "interrupted"
    shutil.copytree(branching.directory, copy, symlinks=True)
    for step in (2, 3):
        shutil.rmtree(copy / f"checkpoints/step-{step}")
    resumed = resume(str(copy), live=False)
    assert losses(resumed) == losses(branching)
    assert largest_difference(weights_of(resumed, "actor"), weights_of(branching, "actor")) == 0
    assert audit(copy / "ledger.sqlite") == []


@pytest.mark.ray
@pytest.mark.long
def test_results_do_not_depend_on_ranks(branching: RunSummary, tmp_path: Path, two_processes: RayActors):
    divided = run(RECIPE, tmp_path, *COMMON, "cluster=cpu-1x2", "steps=2", processes=two_processes)
    assert families(divided) == {
        sample: family for sample, family in families(branching).items() if sample in families(divided)
    }
    for found, wanted in zip(losses(divided), losses(branching), strict=False):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)
