"""What bodies start ends with them, however they, their worker or their fork server end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.forkserver import ForkServer
from pathlib import Path

import psutil
import pytest
from test_pool import Bench

import hflow.processes.forkserver
from hflow.processes.guard import remove_shared_files, shared_file_prefix

LEAVES = 'import os, time; os.fork(); open(os.environ["MARKS"] + f"/{os.getpid()}", "w"); time.sleep(600)'


def start_others(marks: str, how: str, x: int) -> int:
    """Start six processes: three children and a child of each, one pair in a session of its own."""
    environment = {**os.environ, "MARKS": marks}
    for own_session in (False, True):
        command = [sys.executable, "-c", LEAVES]
        subprocess.Popen(command, env=environment, start_new_session=own_session)
    subprocess.run(f"{sys.executable} -c '{LEAVES}' &", shell=True, env=environment, check=True)
    while len(os.listdir(marks)) < 6:
        time.sleep(0.01)
    if how == "exits":
        os._exit(3)
    while how == "hangs":
        time.sleep(1)
    return os.getpid()


def started(marks: Path) -> list[int]:
    return [int(path.name) for path in marks.iterdir()]


def wait_for_end(pids: list[int]) -> None:
    assert len(pids) >= 6
    deadline = time.monotonic() + 30
    while alive := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, [psutil.Process(pid) for pid in alive]
        time.sleep(0.02)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("how", "timeout", "message"),
    [
        ("exits", 60.0, "its process died (exit code 3)"),
        ("hangs", 1.0, "took longer than its timeout of 1 s"),
    ],
)
def test_what_a_body_started_ends_with_its_process(
    tmp_path: Path, how: str, timeout: float, message: str
) -> None:
    bench = Bench(start_others, 1, timeout=timeout)
    try:
        ended = bench.run({0: {"marks": str(tmp_path), "how": how, "x": 0}})
        assert ended[0].message == message
        wait_for_end(started(tmp_path))
    finally:
        bench.pool.close()


def test_what_a_body_started_lives_until_the_pool_is_closed(tmp_path: Path) -> None:
    bench = Bench(start_others, 1)
    left = Path(f"/dev/shm/sem.{shared_file_prefix(os.getpid())}left")
    ended = left.with_name(left.name.replace(f"-{os.getpid()}-", f"-{os.getpid()}-9"))
    left.touch()
    ended.touch()  # by a process with this id that has started at another time
    try:
        bench.run({0: {"marks": str(tmp_path), "how": "returns", "x": 0}})
        pids = started(tmp_path)
        bench.run({1: {"marks": str(tmp_path), "how": "returns", "x": 0}})
        assert all(psutil.pid_exists(pid) for pid in pids)
        remove_shared_files()
        assert left.exists()
        assert not ended.exists()
    finally:
        bench.pool.close()
        left.unlink()
    wait_for_end(started(tmp_path))


def test_a_process_is_started_though_the_server_was_killed(tmp_path: Path) -> None:
    bench = Bench(start_others, 1)
    try:
        bench.run({0: {"marks": str(tmp_path), "how": "returns", "x": 0}})
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended with another one
                is_server = "pool_child" in " ".join(process.cmdline())
                if is_server and process.parent() != psutil.Process():  # the anchor ends a little later
                    process.kill()
        ended = bench.run({1: {"marks": str(tmp_path), "how": "returns", "x": 0}})
        assert ended[1].reason is None
    finally:
        bench.pool.close()


class StoppedServer(ForkServer):
    """A fork server that is stopped before it has a guard."""

    _forkserver_pid: int

    def ensure_running(self) -> None:
        super().ensure_running()
        os.kill(self._forkserver_pid, signal.SIGSTOP)

    def end(self) -> None:
        os.kill(self._forkserver_pid, signal.SIGCONT)
        self._stop()  # type: ignore[attr-defined]


def test_a_process_is_started_though_the_server_is_stopped_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = StoppedServer()
    server.set_forkserver_preload(hflow.processes.forkserver._PRELOADED)
    monkeypatch.setattr(hflow.processes.forkserver, "_server", server)
    bench = Bench(start_others, 1)
    try:
        ended = bench.run({0: {"marks": str(tmp_path), "how": "returns", "x": 0}})
        assert ended[0].reason is None
    finally:
        bench.pool.close()
        server.end()


WORKER = """
import os, sys, time
from test_pool import Bench
from test_process_guard import start_others
bench = Bench(start_others, 1)
bench.pool.submit("body", {0: {"marks": sys.argv[1], "how": "hangs", "x": 0}})
time.sleep(600)
"""


@pytest.mark.first(1)
@pytest.mark.parametrize("how", ["killed by Ray", "guards are stopped"])
def test_nothing_outlives_a_killed_worker(
    how: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ray kills the direct children of a worker too. Guards that are stopped continue when it ends."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    temporary = tmp_path_factory.mktemp("temporary")
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)},
    )
    while len(started(tmp_path)) < 6:
        assert worker.poll() is None
        time.sleep(0.02)
    shared = list(Path("/dev/shm").glob(f"*hflow-*-{worker.pid}-*"))
    assert {path.is_dir() for path in shared} == {False, True}, "semaphores, and a socket"
    direct = psutil.Process(worker.pid).children()
    below = [process.pid for process in psutil.Process(worker.pid).children(recursive=True)]
    if how == "guards are stopped":
        for anchor in direct:
            for guard in anchor.children():  # the tracker of semaphores has none
                guard.suspend()
                anchor.suspend()
    else:
        for process in direct:
            process.kill()
    worker.kill()
    worker.wait()
    wait_for_end([*below, *started(tmp_path)])
    assert not any(path.exists() for path in shared)
    assert list(temporary.iterdir()) == []


STOPPED = """
import os, signal, subprocess, sys
from hflow.processes.guard import die_with_parent
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "child"], stdout=subprocess.PIPE)
    print(child.pid, child.stdout.readline(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
die_with_parent()
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_stopped_process_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text(STOPPED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.run(
        [sys.executable, tmp_path / "stopped.py"], env=environment, stdout=subprocess.PIPE, check=False
    )
    pid, _, line = parent.stdout.partition(b" ")
    assert b"ready" in line
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
