"""The output of `hflow why` and `hflow samples`: text, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from command_line import CommandLine
from ledger_kit import recorded

from hflow.runtime import events as ev
from hflow.runtime.ledger.query import select


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`runs/small/latest` with a ledger in which everything happened once."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "small" / "20260131-142500"
    directory.mkdir(parents=True)
    (directory.parent / "latest").symlink_to(directory.name)
    (directory / "plan.json").write_text("{}")
    with recorded(directory / "ledger.sqlite", max_staleness=2) as run:
        run.ledger.record_weights("actor@gen", 1, "00ab")
        run.issue(1)
        run.issue(3)
        run.ready(2, (0, 3), (1, 5))
        run.ready(3, (0, 2))
        run.refuse(3, node="score", reason=ev.Refusal.FAILED, message="KeyError: 'x' (recipes/grpo.py:19)")
        run.score(2, 0.5)
        run.train(0, 0)
        run.accept(1, 2)
        run.ledger.record_instruction(ev.FormBatch("gen", 1, (2,), (1,)))
        run.ledger.record_instruction(ev.StepDone(1))
        run.refuse(6, node="gen", reason=ev.Refusal.STALE)
        run.refuse(7, node="gen", reason=ev.Refusal.SMALL_GROUP)
        run.issue(4)
        run.ledger.close("stopped")
    return directory


def lines(text: str) -> list[str]:
    """Lines with times as T, and single spaces."""
    return [re.sub(r"\d+\.\d{3} s", "T", " ".join(line.split())) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("sample", "title", "events"),
    [
        (
            "2",
            "gen/2: trained at step 2, lag 1",
            [
                ("issued", "row 11 of train", "group 1", "worker 0", "version 0"),
                ("generated", "8 tokens", "15 with the prompt", "3 by version 0", "5 by version 1"),
                ("version 1", "actor@gen", "00ab"),
                ("score", "reward 0.5"),
                ("advantage",),
                ("accepted", "3 was refused (failed)"),
                ("bound", "step 2"),
                ("trained", "step 2", "lag 1", "at most 2", "1 in flight", "0 in the queue"),
            ],
        ),
        (
            "gen/3",
            "gen/3: refused (failed)",
            [
                ("issued", "row 11 of train"),
                ("generated", "2 tokens", "version 0"),
                ("refused", "score (recipes/grpo.py:17)", "failed", "KeyError: 'x' (recipes/grpo.py:19)"),
            ],
        ),
        ("6", "gen/6: dropped (stale)", [("issued",), ("dropped", "stale", "step 3", "lag 2", "at most 2")]),
        ("7", "gen/7: refused (small_group)", [("issued",), ("refused", "6 was dropped (stale)")]),
        ("8", "gen/8: unused (stopped)", [("issued",), ("unused", "stopped")]),
    ],
)
def test_why_prints_the_history_of_a_sample(
    runs: Path, hflow: CommandLine, sample: str, title: str, events: list[tuple[str, ...]]
):
    head, *rest = lines(hflow.prints("why", "small", sample))
    assert head == title
    text = " ".join(rest[len(events) :])
    assert text.startswith("its text was not kept: report.samples=N keeps")
    for line, (kind, *phrases) in zip(rest[: len(events)], events, strict=True):
        assert line.removeprefix("T ").startswith(kind)
        assert [phrase for phrase in phrases if phrase not in line] == []


@pytest.mark.parametrize("run", ["small", "runs/small", "runs/small/latest"])
def test_a_run_is_named_or_is_a_directory(runs: Path, hflow: CommandLine, run: str):
    history = json.loads(hflow.prints("why", run, "gen/2", "--json"))
    assert (history["end"], history["step"], history["closing"]) == ("trained", 2, "stopped")
    assert history["segments"] == [{"version": 0, "tokens": 3}, {"version": 1, "tokens": 5}]
    assert history["mates"] == [{"id": 3, "end": "refused", "reason": "failed"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("why", "smal", "2"), "there is no run 'smal'; .*did you mean 'small'"),
        (("why", "small", "12"), "gen has no sample 12.* 0 to 9"),
        (("samples", "small", "--where", "lagg > 2"), "no such column: lagg"),
        (("samples", "small", "--json", "--csv"), "use one of them"),
    ],
)
def test_mistakes_are_one_line_errors(
    runs: Path, hflow: CommandLine, arguments: tuple[str, ...], message: str
):
    assert re.search(message, hflow.refused(*arguments))


def test_a_run_without_a_ledger_is_not_suggested_for_itself(runs: Path, hflow: CommandLine):
    (runs.parent / "latest").unlink()
    error = hflow.refused("why", "small", "2")
    assert "runs/small has no latest run" in error
    assert "did you mean" not in error


def test_samples_prints_a_table(runs: Path, hflow: CommandLine):
    shown = lines(hflow.prints("samples", "small", "--limit", "4"))
    assert shown[0] == "stream id row tokens oldest newest reward end step lag reason node"
    assert shown[3] == "gen 2 11 8 0 1 0.5 trained 2 1"
    assert shown[4] == "gen 3 11 2 0 0 refused 1 failed score"
    assert "4 of 8 samples" in shown[5]


def test_the_ledger_of_an_older_run_counts_steps_alike(runs: Path):
    """Its own view counts them from 0."""
    older = Path(shutil.copy("runs/small/latest/ledger.sqlite", "older.sqlite"))
    with closing(sqlite3.connect(older)) as database, database:
        (view,) = database.execute("SELECT sql FROM sqlite_master WHERE name = 'samples'").fetchone()
        now = "CASE e.kind WHEN 'evaluated' THEN e.step ELSE e.step + 1 END"
        database.executescript(f"DROP VIEW samples; {view.replace(now, 'e.step')}")
        assert database.execute("SELECT step FROM samples WHERE id = 2").fetchone() == (1,)
    assert select(older).rows == select(Path("runs/small/latest/ledger.sqlite")).rows
    assert [row["step"] for row in select(older, "id = 2 and step = 2").to_json()] == [2]


def test_samples_prints_json_csv_and_counts(runs: Path, hflow: CommandLine):
    chosen = ("--where", "end = 'dropped' or lag = 1")
    rows = json.loads(hflow.prints("samples", "small", *chosen, "--json"))
    assert [(row["id"], row["end"], row["lag"]) for row in rows] == [(2, "trained", 1), (6, "dropped", 2)]
    table = list(csv.DictReader(io.StringIO(hflow.prints("samples", "small", *chosen, "--csv"))))
    assert [(row["id"], row["end"], row["reward"]) for row in table] == [
        ("2", "trained", "0.5"),
        ("6", "dropped", ""),
    ]
    assert hflow.prints("samples", "small", *chosen, "--count") == "2\n"
