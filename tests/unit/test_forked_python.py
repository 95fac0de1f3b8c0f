"""Programs that tests fork from a server behave as those of a fresh interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest

PROGRAMS = {
    "state": (
        "import os, signal, sys\n"
        "print(__name__, sys.argv, sys.path[0], os.getcwd(), os.getppid(), os.getpgid(0))\n"
        "print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE)])\n"
        "print(len(os.listdir('/proc/self/fd')), sys.stdin.read(), end='')\n"
        "print([(x.encoding, x.errors, x.line_buffering) for x in (sys.stdout, sys.stderr)])\n"
    ),
    "end": "import atexit; atexit.register(print, 'end'); raise SystemExit('bye')",
    "error": "print('begun'); 1 / 0",
    "killed": "import os; print('lost'); os.kill(os.getpid(), 9)",
    "terminated": "import os; print('lost'); os.kill(os.getpid(), 15)",
}


CASES = [("-c", name) for name in PROGRAMS] + [("-m", "state"), ("script", "state")]


@pytest.mark.parametrize(("form", "name"), CASES)
def test_a_forked_program_is_like_a_fresh_one(form: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAMS[name])
    words = {"-c": ["-c", PROGRAMS[name]], "script": [str(file)], "-m": ["-m", "program"]}[form]
    command = [sys.executable, *words, "--an", "argument"]
    fresh, forked = (
        starter(command, cwd=tmp_path, input="typed", capture_output=True, text=True)
        for starter in (subprocess.run, forked_python.run)
    )
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout)
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_a_forked_process_is_a_child_that_leads_its_session() -> None:
    command = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    with forked_python.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert os.getsid(process.pid) == process.pid
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


@pytest.mark.long
def test_imports_read_the_variables_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "33")
    command = [sys.executable, "-c", "import os; print(os.environ['COLUMNS'])"]
    assert forked_python.run(command, stdout=subprocess.PIPE).stdout == b"33\n"
