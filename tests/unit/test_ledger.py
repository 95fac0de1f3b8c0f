"""The ledger: what it records of each sample, and what it survives."""

from __future__ import annotations

import io
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_kit import ends_of, recorded, row_of
from rich.console import Console
from state_script import grpo

from hflow.base.errors import ConfigError, RunError
from hflow.report.text.ledger import render_samples, render_story
from hflow.runtime import events as ev
from hflow.runtime.ledger import Ledger, audit, query, rewind, writer
from hflow.runtime.ledger.header import schedule_header
from hflow.runtime.ledger.query import count, read_overview, select
from hflow.runtime.ledger.sample_history import read_history
from hflow.workers.interface import ComputeReady, NodeResult, Span


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def test_the_life_of_a_trained_sample(path: Path):
    with recorded(path, max_staleness=2) as run:
        run.train(0, 0)
        run.issue(1, version=0)
        for version, digest in ((0, "0a"), (1, "1b"), (2, "2c")):
            run.ledger.record_weights("actor@gen", version, digest)
        run.ready(2, (0, 3), (1, 5))
        run.ready(3, (1, 2))
        run.score(2, 0.5)
        run.score(3, 0.0)
        run.accept(1)
        run.form(1, 9)
        run.ledger.record_instruction(ev.StepDone(1))
        run.form(2, 1)
        run.ledger.record_instruction(ev.StepDone(2))
    row = row_of(path, 2)
    assert (row["stream"], row["group_id"], row["row"], row["worker"], row["version"]) == ("gen", 1, 11, 0, 0)
    assert (row["length"], row["tokens"], row["turns"], row["oldest"], row["newest"]) == (15, 8, 1, 0, 1)
    assert (row["reward"], row["end"], row["step"]) == (0.5, "trained", 3)
    assert (row["lag"], row["in_flight_lag"], row["in_queue_lag"]) == (2, 1, 1)
    assert 0 <= row["issued_at"] <= row["finished_at"] <= row["accepted_at"] <= row["ended_at"] < 60
    story = read_history(path, "gen/2")
    assert story.segments == ((0, 3), (1, 5))
    assert [(held.version, held.replica, held.digest) for held in story.weights] == [
        (0, "actor@gen", "0a"),
        (1, "actor@gen", "1b"),
    ]
    assert [(node.node, node.value) for node in story.computed] == [("score", 0.5), ("advantage", None)]
    assert [(mate.id, mate.end) for mate in story.mates] == [(3, "trained")]
    assert story.bound_at is not None
    assert row["accepted_at"] <= story.bound_at <= row["ended_at"]


def test_a_failed_reward_is_a_refusal_with_a_reason_and_no_number(path: Path):
    with recorded(path) as run:
        run.issue(0)
        run.ready(0, (0, 4))
        run.refuse(0, node="score", reason=ev.Refusal.FAILED, message="KeyError: 'x' (recipes/grpo.py:19)")
        counts = run.ledger.close("stopped")
    row = row_of(path, 0)
    assert row["reward"] is None
    assert (row["end"], row["reason"], row["node"]) == ("refused", "failed", "score")
    assert (row["place"], row["message"]) == ("recipes/grpo.py:17", "KeyError: 'x' (recipes/grpo.py:19)")
    assert counts == {"refused": 1, "unused": 1}
    assert audit(path) == []


def test_a_filter_that_refused_a_sample_is_told(path: Path):
    with recorded(path) as run:
        run.issue(0)
        run.ready(0, (0, 4))
        run.ledger.record_result(ComputeReady("score", 0, keep=False))
        run.refuse(0, node="score", reason=ev.Refusal.KEEP)
    console = Console(file=io.StringIO(), width=200)
    console.print(render_story(read_history(path, "0")))
    assert "score did not keep it" in " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_samples_of_an_update_that_was_skipped_are_named(path: Path):
    def skip(step: int, *samples: int) -> None:
        span = Span("actor_train", "device", 0.0, 1.0)
        run.ledger.record_result(NodeResult("actor_train", step, (2, 3), {}, span, skipped=samples))

    with recorded(path) as run:
        run.train(0, 0)
        run.train(1, 1, version=1, on_batch=lambda: skip(1, 3))
        run.issue(2)
        run.ready(4, (1, 4))
        run.ready(5, (1, 4))
        run.accept(2)
        run.form(2, 2)
        skip(2, 4)
    assert count(path, "reason = 'nonfinite'") == 1
    row = row_of(path, 3)
    assert (row["end"], row["step"], row["reason"]) == ("trained", 2, "nonfinite")
    assert row["message"] == "actor_train skipped an update with it, as the gradient was not finite"
    assert (row_of(path, 2)["end"], row_of(path, 2)["reason"]) == ("trained", None)
    assert row_of(path, 4)["end"] == "unused"
    console = Console(file=io.StringIO(), width=200)
    console.print(render_story(read_history(path, "3")))
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert text.startswith("gen/3: trained at step 2, lag 0 (nonfinite)")
    assert f"step 2 is complete; lag 0 of at most 0, 0 in flight and 0 in the queue; {row['message']}" in text
    assert audit(path) == []


def test_stale_samples_are_dropped_with_their_would_be_lag(path: Path):
    with recorded(path) as run:
        run.issue(5, version=0)
        run.ready(10, (0, 4))
        run.train(0, 0)
        run.train(1, 1, version=1)
        run.refuse(10, node="gen", reason=ev.Refusal.STALE)
        run.refuse(11, node="gen", reason=ev.Refusal.STALE)
    finished, running = row_of(path, 10), row_of(path, 11)
    assert (finished["end"], finished["reason"], finished["step"], finished["lag"]) == (
        "dropped",
        "stale",
        3,
        2,
    )
    assert (running["oldest"], running["lag"]) == (None, 2)
    assert count(path, "reason = 'stale' and lag > 1") == 2


def test_the_end_of_a_run_records_how_far_each_sample_got(path: Path):
    with recorded(path) as run:
        for group in range(3):
            run.issue(group)
        run.ready(0, (0, 1))
        for group in (1, 2):
            run.ready(2 * group, (0, 1))
            run.ready(2 * group + 1, (0, 1))
            run.accept(group)
        run.form(0, 2)
        assert run.ledger.close("stopped") == {"unused": 6}
    said = {sample: row_of(path, sample)["message"] for sample in (0, 1, 2, 4)}
    assert said == {
        0: "its group was not complete",
        1: "it was not finished",
        2: "it was accepted and waited for its batch",
        4: "it was in the batch of step 1, which was not completed",
    }
    assert {row_of(path, sample)["reason"] for sample in range(6)} == {"stopped"}
    assert audit(path) == []


def test_a_run_that_fails_loses_nothing(path: Path):
    def fail() -> None:
        with recorded(path) as run:
            for group in range(500):
                run.issue(group)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert count(path, "end = 'unused' and reason = 'failed'") == 1000


KILLED = """
import os, signal
from pathlib import Path
from ledger_kit import recorded

with recorded(Path({path!r})) as run:
    run.train(0, 0, 1)
    run.issue(2)
    run.ledger.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_a_consistent_ledger(path: Path):
    code = textwrap.dedent(KILLED.format(path=str(path)))
    kits = Path(__file__).parents[1] / "kits"
    child = subprocess.run([sys.executable, "-c", code], cwd=kits, check=False)
    assert child.returncode == -signal.SIGKILL
    assert [end for end, _ in ends_of(path).values()] == ["trained"] * 4 + [None] * 2
    assert audit(path) == []
    assert read_history(path, "4").closing is None


def test_a_run_that_is_killed_while_it_creates_its_ledger_begins_again(path: Path):
    """The file has all tables or none."""
    header = schedule_header(grpo(shared=False))
    with pytest.raises(KeyError):
        Ledger(path, replace(header, nodes=(replace(header.nodes[0], stream="unknown"),)))
    rewind(path, 0, 0)
    with recorded(path) as run:
        run.train(0, 0)
    assert audit(path) == []
    assert count(path) == 2


def test_a_sample_that_begins_again_says_why_and_has_one_end(path: Path):
    with recorded(path) as run:
        run.issue(1)
        run.ledger.record_restarted("gen", (2,), "worker 1 died while generating")
        for sample in (2, 3):
            run.ready(sample, (0, 3))
        run.accept(1)
        run.form(0, 1)
        run.ledger.record_instruction(ev.StepDone(0))
    assert audit(path) == []
    assert [restart.reason for restart in read_history(path, "2").restarts] == [
        "worker 1 died while generating"
    ]
    assert read_history(path, "3").restarts == ()


def test_a_sample_says_how_its_interrupted_episode_went_on(path: Path):
    with recorded(path) as run:
        run.issue(1)
        for sample, text in ((2, "the episode was interrupted, and continued"), (3, "")):
            run.ready(sample, (0, 3), interruption=text)
        run.accept(1)
        run.form(0, 1)
        run.ledger.record_instruction(ev.StepDone(0))
    assert audit(path) == []
    (restart,) = read_history(path, "2").restarts
    assert restart.reason == "the episode was interrupted, and continued"
    assert read_history(path, "3").restarts == ()


CONDITIONS = (
    None,
    "tokens > 2",
    "reward >= 0.5 OR reward IS NULL",
    "\"END\" = 'trained' AND lag = 1",
    "node = 'score'",
    "step = 2",
    "id IN (SELECT id FROM samples WHERE tokens = 3)",
    "finished_at IS NULL",
    "in_queue_lag = 0 and Stream = 'gen'",
    "0",
)


@pytest.mark.parametrize("went_back", [False, True])
def test_a_condition_finds_what_the_whole_view_has(path: Path, went_back: bool):
    """A query reads the tables that its condition needs; the view reads all."""
    with recorded(path) as run:
        run.train(0, 0)
        position = run.ledger.position()
        run.train(1, 1, version=1)
        run.issue(2)
        run.ready(4, (1, 3))
        run.score(4, 0.75)
        run.refuse(4, node="score", reason=ev.Refusal.KEEP)
        run.issue(3)
    if went_back:
        rewind(path, 1, position)
        with recorded(path) as run:
            run.train(1, 2, version=1)
    with closing(sqlite3.connect(path)) as database:
        for where in CONDITIONS:
            sql = f"SELECT * FROM samples WHERE {where or 1} ORDER BY stream, id"
            expected = database.execute(sql).fetchall()
            found = select(path, where)
            assert (list(found.rows), found.total) == (expected, len(expected)), where
            assert count(path, where) == len(expected), where
            assert select(path, where, 1).total == len(expected), where
        ends = dict(
            database.execute("SELECT COALESCE(\"end\", 'in flight'), COUNT(*) FROM samples GROUP BY 1")
        )
    assert dict(read_overview(path).ends) == ends


def test_samples_beyond_a_limit_are_counted_up_to_a_number(path: Path, monkeypatch: pytest.MonkeyPatch):
    with recorded(path) as run:
        run.train(0, 0)
        run.train(1, 1, version=1)
    assert (select(path, None, 1).total, select(path, None, 1).is_exact) == (4, True)
    monkeypatch.setattr(query, "MAX_COUNTED", 3)
    found = select(path, None, 1)
    assert (len(found.rows), found.total, found.is_exact) == (1, 3, False)
    assert count(path) == 4
    console = Console(file=io.StringIO(), width=200)
    console.print(render_samples(found.to_json(), found.total, is_exact=found.is_exact))
    assert "the first 1 of at least 3 samples" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_resumed_run_has_one_history(path: Path):
    with recorded(path) as run:
        run.issue(9)  # it still runs when step 0 is complete
        run.train(0, 0)
        position = run.ledger.position()
        run.train(1, 1, version=1)
    with pytest.raises(RunError, match="cannot continue after step 3"):
        rewind(path, 3, position)
    rewind(path, 1, position)
    with recorded(path) as run:
        run.train(1, 2, version=1)
        run.train(2, 1, version=2)
        run.ready(18, (3, 1))
        run.ready(19, (3, 1))
        run.accept(9)
        run.form(3, 9)
        run.ledger.record_instruction(ev.StepDone(3))
    assert {key[1]: end for key, end in ends_of(path).items()} == {
        **dict.fromkeys((0, 1), ("trained", 1)),
        **dict.fromkeys((4, 5), ("trained", 2)),
        **dict.fromkeys((2, 3), ("trained", 3)),
        **dict.fromkeys((18, 19), ("trained", 4)),
    }
    assert audit(path) == []
    database = sqlite3.connect(path)
    database.execute("DELETE FROM rewinds")
    database.commit()
    database.close()
    assert {line.partition(":")[0] for line in audit(path)} >= {"issued twice", "more than one end"}


def test_nothing_is_lost_where_the_writer_cannot_keep_up(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer, "MAX_TRANSACTION", 5)
    monkeypatch.setattr(writer, "MAX_WAITING", 10)
    with recorded(path) as run:
        for group in range(300):
            run.issue(group)
            assert len(run.ledger._writer._waiting) <= 10
    assert count(path) == 600


def test_a_file_that_cannot_be_written_ends_the_run(path: Path, tmp_path: Path):
    with (
        pytest.raises(RunError, match=r"nowhere/ledger.sqlite cannot be written"),
        recorded(tmp_path / "nowhere" / "ledger.sqlite"),
    ):
        pass
    with pytest.raises(RunError, match="cannot be written: no such table: issued"):
        _lose_its_table(path)


def _lose_its_table(path: Path) -> None:
    with recorded(path) as run:
        other = sqlite3.connect(path)
        other.execute("DROP VIEW samples")
        other.execute("DROP TABLE issued")
        other.close()
        run.issue(0)


@pytest.mark.parametrize(
    ("sql", "claim"),
    [
        ("DELETE FROM ends WHERE sample = 0", "no end: gen/0"),
        (
            "INSERT INTO ends SELECT stream, sample, 999, 0, kind, step, reason, node, message FROM ends",
            "more than",
        ),
        (
            "INSERT INTO issued SELECT stream, sample, 0, 0, 0, 0, 0, 0 FROM issued",
            "issued twice: gen/0, gen/1",
        ),
        ("DELETE FROM issued WHERE sample = 1", "ends, but not issued before: gen/1"),
        ("DELETE FROM finished WHERE sample = 1", "used, but not finished before: gen/1"),
        ("DELETE FROM accepted WHERE sample = 1", "used, but not accepted before: gen/1"),
        ("UPDATE accepted SET seq = 998 WHERE sample = 1", "accepted after its end: gen/1"),
        ("DELETE FROM steps", "trained at a step that was not completed: gen/0, gen/1"),
        (
            "UPDATE ends SET step = 1 WHERE sample = 0",
            "trained with a larger lag than the plan certifies: gen/0",
        ),
        ("UPDATE ends SET reason = NULL WHERE sample = 2", "refused or dropped without a reason: gen/2"),
        ("UPDATE ends SET node = NULL WHERE sample = 2", "refused or dropped without a reason: gen/2"),
        (
            "UPDATE segments SET number = 1 WHERE sample = 0",
            "segments whose numbers have gaps or whose versions do not ascend: gen/0",
        ),
        ("UPDATE segments SET version = 1 WHERE sample = 0", "segments that do not reach from the oldest"),
    ],
)
def test_an_audit_finds(path: Path, sql: str, claim: str):
    with recorded(path) as run:
        run.train(0, 0)
        run.issue(1)
        run.refuse(2, node="gen", reason=ev.Refusal.TIMEOUT, message="it took longer than 2 s")
        run.ledger.close("done")
    assert audit(path) == []
    database = sqlite3.connect(path)
    assert database.execute(sql).rowcount > 0
    database.commit()
    database.close()
    assert any(violation.startswith(claim) for violation in audit(path)), audit(path)


@pytest.fixture
def asked(path: Path) -> Path:
    with recorded(path) as run:
        run.train(0, 0, 1)
        run.issue(2)
    return path


def test_samples_are_chosen_by_sql(asked: Path):
    assert len(select(asked, limit=10**30).rows) == select(asked).total
    found = select(asked, "end = 'trained'", limit=3)
    assert [row["id"] for row in found.to_json()] == [0, 1, 2]
    assert found.total == 4
    assert count(asked) == 6


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("lagg > 2", "no such column: lagg; the columns are id, stream, group_id"),
        ("1; DELETE FROM ends", 'near ";": syntax error'),
        ("id IN (SELECT * FROM pragma_table_info('ends'))", "not authorized"),
        ("", "syntax error"),
    ],
)
def test_sql_that_is_none_is_refused(asked: Path, where: str, says: str):
    with pytest.raises(ConfigError) as error:
        select(asked, where)
    assert says in str(error.value)
    assert count(asked) == 6


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("6", "gen has no sample 6. It has samples 0 to 5."),
        ("9" * 30, f"gen has no sample {'9' * 30}. It has samples 0 to 5."),
        ("gem/0", "there is no stream 'gem' among gen; did you mean 'gen'?"),
        ("x", "'x' is not a sample. Use a number, or STREAM/NUMBER."),
    ],
)
def test_a_sample_that_is_none_is_refused(asked: Path, name: str, says: str):
    with pytest.raises(ConfigError) as error:
        read_history(asked, name)
    assert str(error.value) == says


def test_a_ledger_can_be_read_during_the_run(path: Path):
    with recorded(path) as run:
        run.train(0, 0)
        run.ledger.flush()
        assert row_of(path, 1)["end"] == "trained"
        run.train(1, 1, version=1)
        run.ledger.flush()
        assert row_of(path, 3)["end"] == "trained"
        assert audit(path) == []
