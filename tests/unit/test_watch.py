"""`hflow watch`: the page that follows a run, its server, and the files of a run in progress."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import CommandLine
from run_files import EVIL, reward_rows, write_full_run, write_run
from test_page import Page

from hflow.base.errors import ConfigError
from hflow.launch.results.runs import read_report
from hflow.launch.results.watch import RunPage, find_watched, serve_page, ssh_tunnel
from hflow.report.html.run import render_run_page
from hflow.runtime.records.activity import Activity, OngoingWork, read_activity, write_activity
from hflow.runtime.records.live_files import LiveFiles
from hflow.runtime.records.trace import Trace
from hflow.runtime.saving.run_directory import RunDirectory
from hflow.workers.interface import Span


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_full_run(tmp_path / "run")


@contextmanager
def served(run: Path) -> Iterator[int]:
    """The port of a server of a run's page."""
    with serve_page(RunPage(str(run)), 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def ask(port: int, path: str = "/", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def test_the_server_has_the_page_of_the_run_and_nothing_else(run: Path) -> None:
    with served(run) as port:
        answer = ask(port)
        text = answer.read().decode()
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "Done after 20 steps" in Page(text).text
        assert answer.headers["Cache-Control"] == "no-store"
        tag = answer.headers["ETag"]
        assert ask(port, **{"If-None-Match": tag}).status == 304
        for path in ("/plan.json", "/../plan.json", "/?", "/runs"):
            assert ask(port, path).status == 404
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(port, method=method).status == 501


HOSTS = {
    "127.0.0.1": 200,
    "localhost:9999": 200,
    "LOCALHOST": 200,
    "[::1]:80": 200,
    "evil.example": 403,
    "127.0.0.1.evil.example": 403,
    "localhost.evil.example:80": 403,
    "localhost@evil.example": 403,
    "192.168.0.1": 403,
    "": 403,
}
"""Name by which a server is asked -> the status of its reply."""


def test_names_of_other_sites_are_refused(run: Path) -> None:
    """A site could let its name point to 127.0.0.1, and read the page. Behind `ssh -L` the port differs."""
    with served(run) as port:
        assert {host: ask(port, Host=host).status for host in HOSTS} == HOSTS


def test_mistakes_are_one_line(run: Path, tmp_path: Path, hflow: CommandLine) -> None:
    assert "there is no run" in hflow.refused("watch", tmp_path / "none")
    with served(run) as port:
        assert "another --port" in hflow.refused("watch", run, "--port", str(port))
    (run / "trace.json").write_text("no json")
    assert "trace.json is not" in hflow.refused("watch", run, "--port", "0")


def test_a_file_that_is_damaged_later_is_named(run: Path) -> None:
    with served(run) as port:
        (run / "plan.json").write_text("no json")
        answer = ask(port)
        assert (answer.status, b"plan.json is not" in answer.read()) == (503, True)


def test_a_run_that_goes_on_shows_what_it_does(run: Path) -> None:
    now = time.time()
    directory = RunDirectory(run)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in reward_rows(0.1)))
    awaited = Activity(awaited=(f"actor@gen {EVIL}", now - 40))
    with directory.locked():
        write_activity(directory.activity, awaited)
        text = Page(render_run_page(read_report(str(run), is_live=True), now)).text
        assert "Still going, 1 of 20 steps. This page follows it." in text
        assert f"Waiting for actor@gen {EVIL}: 40 s." in text
        work = (
            OngoingWork("actor_train", "device", (0,), now - 12, 6),
            OngoingWork("generate actor@gen", "generate", (1,), now - 30, 5),
        )
        busy = Activity(now - 34, None, work, {"actor_gen": (3, 8)}, 10.0, ("be careful",))
        write_activity(directory.activity, busy)
        html = render_run_page(read_report(str(run), is_live=True), now)
        text = Page(html).text
        assert "actor_train, generating: 12 s. The step has taken 34 s so far. About 3 min" in text
        for part in ("3 of 8", "actor_train, step 6", "generate actor@gen, step 5", "be careful"):
            assert part in text
        assert "connect-src 'self'" in html
        assert read_activity(directory.activity) == busy
    ended = render_run_page(read_report(str(run), is_live=True), now)
    assert "generate actor@gen, step 5" not in Page(ended).text
    assert "connect-src" not in render_run_page(read_report(str(run)))


def test_a_run_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    with RunDirectory(run).locked():
        text = Page(render_run_page(read_report(str(run), is_live=True), time.time())).text
    assert "No step is complete yet." in text


def test_the_samples_that_finished_last_come_first(run: Path) -> None:
    report = read_report(str(run), is_live=True)
    assert report.ledger is not None
    times = [row["finished_at"] or 0.0 for row in report.ledger.samples]
    assert times == sorted(times, reverse=True)
    assert {row["id"] for row in report.ledger.samples} >= {0, 1, 6, 9}, "and those with texts"


def test_the_timeline_ends_now_unless_the_trace_is_behind(tmp_path: Path) -> None:
    trace = Trace()
    trace.add(0, Span("actor_train", "device", 100.0, 101.0, {"step": 0}))
    run = write_run(tmp_path / "run", reward_rows(0.1))
    trace.write(run / "trace.json")
    measured = read_report(str(run)).trace
    assert (measured.start, measured.end) == (100.0, pytest.approx(time.time(), abs=3600))
    assert measured.end is not None
    end = measured.end
    known = measured.until_now(Activity(work=(OngoingWork("a", "device", (0,), end - 5, 1),)), end + 60)
    assert [(span.name, span.end) for span in known[1:]] == [("a", end - 40)]
    work = (OngoingWork("a", "device", (0,), end - 5, 1), OngoingWork("b", "device", (1,), end + 5, 2))
    behind = measured.until_now(Activity(work=work), end + 60)
    assert [(span.name, span.end) for span in behind[1:]] == [("a", end - 100)]


def test_a_run_that_starts_is_meant_and_not_the_one_before(tmp_path: Path) -> None:
    before = RunDirectory.create(tmp_path, "grpo", "steps: 2\n", "{}\n")
    before.link_latest()
    starting = RunDirectory.create(tmp_path, "grpo", "steps: 2\n", "{}\n")
    assert find_watched(str(tmp_path / "grpo")).path.resolve() == before.path
    with starting.locked():
        assert find_watched(str(tmp_path / "grpo")).path == starting.path
        assert find_watched(str(tmp_path / "grpo/latest")).path == starting.path
        assert find_watched(str(before.path)).path == before.path, "named itself"


def test_the_files_of_a_run_follow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hflow.runtime.records.live_files.ACTIVITY_SECONDS", 0.01)
    monkeypatch.setattr("hflow.runtime.records.live_files.TRACE_SECONDS", 0.02)
    trace, activity = Trace(), [Activity()]
    trace_file, activity_file = tmp_path / "trace.json", tmp_path / "activity.json"
    files = LiveFiles(trace, trace_file, lambda: activity[0], activity_file)
    trace.add(0, Span("a", "device", 0.0, 1.0))
    activity[0] = Activity(step_start=1.0)
    while not trace_file.exists() or read_activity(activity_file) != activity[0]:
        time.sleep(0.01)
    trace.add(0, Span("b", "device", 1.0, 2.0))
    files.close()
    assert not activity_file.exists()
    assert '"b"' in trace_file.read_text()


def test_a_damaged_activity_is_named(tmp_path: Path) -> None:
    file = tmp_path / "activity.json"
    assert read_activity(file) is None
    for content in ("no json", "[]", "{}", '{"step_start": 1}'):
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"activity\.json is not"):
            read_activity(file)


def test_over_ssh_the_tunnel_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    assert ssh_tunnel(8100, {}) is None
    assert ssh_tunnel(8100, {"SSH_CONNECTION": "10.0.0.9 50000 10.0.0.1 22"}) == (
        "ssh -N -L 8100:127.0.0.1:8100 ada@10.0.0.1"
    )
    assert ssh_tunnel(8100, {"SSH_CONNECTION": "10.0.0.9 50000 10.0.0.1 2222"}) == (
        "ssh -N -L 8100:127.0.0.1:8100 -p 2222 ada@10.0.0.1"
    )
