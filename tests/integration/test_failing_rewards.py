"""Rewards that are slow, hang or die beside training: each sample has one end, with its reason."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from runs import TINY, run, steps_of

from hflow.report.text.ledger import render_story
from hflow.runtime.ledger import audit
from hflow.runtime.ledger.query import count, select
from hflow.runtime.ledger.sample_history import read_history
from hflow.runtime.records.run_summary import RunSummary

RECIPE = '''"""A reward that goes wrong in every way: the prompt says how, the completion on which samples."""

import os
import pathlib
import signal
import time

from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

train = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", timeout=TIMEOUT, retries=1, backoff=0.01, returns="reward")
def score(completion: str, prompt: str) -> float:
    wrong = prompt[1] if sum(map(ord, completion)) % 2 else ""
    if wrong == "3":
        raise KeyError(prompt)
    if wrong and wrong in "56":
        os.kill(os.getpid(), signal.SIGKILL)
    if wrong and wrong in "47":
        os._exit(5)
    while wrong and wrong in "89012" and hangs(f"hang-{prompt}{completion}"):
        time.sleep(0.1)
    return float(len(completion))


def hangs(name: str) -> bool:
    """Only three samples do, early: nothing would make the last groups of the run old."""
    marks = pathlib.Path(__file__).parent
    if len(list(marks.glob("hang-*"))) < 3:
        (marks / name).touch()
    return (marks / name).exists()


recipe = Recipe(
    "wrong",
    train,
    [
        use(nodes.actor_gen, actor, group=4),
        score,
        use(nodes.group_advantage, min_group=MIN_GROUP),
        use(nodes.actor_train, actor, prox="none"),
    ],
)
'''
ASKED = [
    *TINY,
    "workers=inproc",
    "cluster=cpu-1x1",
    "batch=4",
    "steps=6",
    "models.actor.architecture.hidden_size=32",
    "schedule.max_staleness=2",
    "schedule.max_concurrent=32",
]


def wrong(directory: Path, timeout: float | None, *overrides: str, min_group: int = 2) -> RunSummary:
    recipe = directory / "wrong.py"
    recipe.write_text(RECIPE.replace("TIMEOUT", str(timeout)).replace("MIN_GROUP", str(min_group)))
    return run(recipe, directory / "runs", *ASKED, *overrides)


def ledger_of(summary: RunSummary) -> Path:
    """What holds whatever goes wrong: all steps were trained, and each sample has one end."""
    ledger = summary.directory / "ledger.sqlite"
    assert sum(row.get("score/retries", 0) for row in steps_of(summary)) > 0
    assert audit(ledger) == []
    assert (summary.reason, len(steps_of(summary))) == ("done", 6)
    assert sum(summary.sample_ends.values()) == count(ledger)
    assert count(ledger, "end = 'trained' and reward is null") == 0
    return ledger


def groups_of(ledger: Path) -> dict[int, list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in select(ledger).to_json():
        groups.setdefault(int(row["id"]) // 4, []).append(row)
    return groups


def test_rewards_that_raise_hang_or_die_are_refused_with_their_reasons(tmp_path: Path) -> None:
    """Nothing is dropped, so the last step needs the groups that hang to come to their end."""
    ledger = ledger_of(wrong(tmp_path, 1.0, "schedule.age_rule=false"))
    refused = select(ledger, "end = 'refused' and node = 'score' and reason <> 'small_group'").to_json()
    told = {(row["reason"], re.sub(r"'.*", "", str(row["message"]))) for row in refused}
    wanted = {
        ("failed", "KeyError: "),
        ("failed", "its process died (exit code 5); tried 2 times"),
        ("failed", "its process died (exit code -9); tried 2 times"),
        ("timeout", "took longer than its timeout of 1 s; tried 2 times"),
    }
    # Python's server of processes says 255 where it has lost the exit code.
    assert wanted <= told <= wanted | {("failed", "its process died (exit code 255); tried 2 times")}
    for members in groups_of(ledger).values():
        trained = [row for row in members if row["end"] == "trained"]
        failed = [row for row in members if row["reason"] in ("failed", "timeout")]
        assert len(trained) in (0, 2, 3, 4)
        assert not trained or len(trained) + len(failed) == 4, "a member was lost for nothing"
        if any(row["reason"] == "small_group" for row in members):
            assert len(failed) == 3


@pytest.mark.long
def test_a_reward_that_hangs_for_ever_drops_its_groups_and_nothing_else(tmp_path: Path) -> None:
    """Without a timeout: the age rule ends them, and the processes that they hold."""
    summary = wrong(tmp_path, None, min_group=4)
    ledger = ledger_of(summary)
    bound = json.loads((summary.directory / "plan.json").read_text())["plan"]["staleness_bound"]
    assert all(row["staleness/max"] <= bound == 2 for row in steps_of(summary))
    stale = select(ledger, "reason = 'stale'").to_json()
    assert stale
    assert summary.sample_ends["dropped"] == len(stale)
    waited = next(row for row in stale if row["reward"] is None)
    assert (waited["end"], waited["message"]) == ("dropped", "score had not answered")
    story = read_history(ledger, str(waited["id"]))
    console = Console(file=io.StringIO(), record=True, width=120)
    console.print(render_story(story))
    assert "stale: step" in (told := " ".join(console.export_text().split()))
    assert "score had not answered" in told


READY_MADE = '''"""Ready-made rewards, of which one fails on a row without tests."""

from hflow import Dataset, Json, Model, Recipe, Text, nodes, rewards, use

train = Dataset("train", prompt=Text, answer=Text, tests=Json)
actor = Model("actor", trainable=True)

recipe = Recipe(
    "ready_made",
    train,
    [
        use(nodes.actor_gen, actor, group=2),
        rewards.exact,
        rewards.code,
        use(rewards.overlong, limit=4, buffer=2),
        rewards.combine(exact=1.0, code=0.5, overlong=0.25),
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
    ],
)
'''


def test_ready_made_rewards_are_combined_logged_and_never_0_for_a_failure(tmp_path: Path) -> None:
    recipe, rows = tmp_path / "ready_made.py", tmp_path / "rows.jsonl"
    recipe.write_text(READY_MADE)
    tests = [[{"input": "", "output": ""}], []]
    rows.write_text(
        "".join(json.dumps({"prompt": "1+1=", "answer": "002", "tests": test}) + "\n" for test in tests * 4)
    )
    data = [f"data.train.path={rows}", "data.train.generator=null"]
    changed = ["batch=2", "steps=2", "schedule.max_staleness=0", "nodes.reward.code_weight=2"]
    summary = run(recipe, tmp_path / "runs", *ASKED, *data, *changed)
    for row in steps_of(summary):
        shares = {name: row[f"actor_gen/reward.{name}"] for name in ("exact", "code", "overlong")}
        means = {name: row[f"actor_gen/{name}"] for name in shares}
        assert shares["code"] == 2 * means["code"]
        assert shares["overlong"] == 0.25 * means["overlong"] < 0
        assert abs(row["actor_gen/reward"] - sum(shares.values())) < 1e-6
    refused = select(summary.directory / "ledger.sqlite", "reason = 'failed'").to_json()
    assert {(row["node"], re.sub(r" \(.*", "", str(row["message"]))) for row in refused} == {
        ("code", "ValueError: the row has no tests")
    }
