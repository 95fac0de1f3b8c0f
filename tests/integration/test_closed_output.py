"""Runs whose output has no reader any more continue; runs whose terminal is closed are saved."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import forked_python
import psutil
import pytest
from runs import ROOT, TINY

from hflow.launch.running.stop_signals import stop_signals
from hflow.runtime.saving.checkpoint import verify_checkpoint

SECONDS = 240.0
OPTIONS = [
    *TINY,
    *("+data@data.heldout=addition", "data.heldout.limit=6", "nodes.eval_gen.max_tokens=4"),
    *("nodes.eval_gen.after=100000", "batch=4", "save_minutes=0"),
]
INPROC = ["workers=inproc", "cluster=cpu-1x1"]


def command(recipe: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "hflow", "run", str(recipe), f"out={out}", *OPTIONS, *options]


def talkative(directory: Path) -> Path:
    """Return a recipe whose reward prints, in a process of the pool."""
    text = (ROOT / "recipes" / "grpo.py").read_text()
    path = directory / "talkative.py"
    path.write_text(text.replace("    return float", "    print(completion, flush=True)\n    return float"))
    return path


def summary_of(out: Path) -> dict[str, Any]:
    (path,) = out.glob("*/2*/summary.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(
    "redirect", [pytest.param("| head -1", marks=pytest.mark.long), ">&- 2> /dev/full <&-"]
)
def test_a_run_without_a_reader_continues(redirect: str, tmp_path: Path) -> None:
    """Its rewards print too; none is refused for that."""
    words = command(talkative(tmp_path), tmp_path, "steps=3", *INPROC)
    line = f"set -o pipefail; {subprocess.list2cmdline(words)} {redirect}"
    ended = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert (ended.returncode, ended.stderr) == (0, "")
    summary = summary_of(tmp_path)
    assert (summary["reason"], summary["samples"]["trained"]) == ("done", 3 * 4 * 8)


class Terminal:
    """A terminal in which a command runs, until it is closed."""

    def __init__(self, words: Sequence[str]) -> None:
        self._ours, theirs = pty.openpty()
        self.child = forked_python.Popen(
            words,
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)

    def wait_for_steps(self, out: Path, steps: int) -> None:
        """Show what the command prints until its run has completed so many steps."""
        deadline, shown = time.monotonic() + SECONDS, b""
        while not any(_num_steps(path) >= steps for path in out.glob("*/2*/metrics.jsonl")):
            assert time.monotonic() < deadline, shown
            if select.select([self._ours], [], [], 0.1)[0]:
                shown += os.read(self._ours, 1 << 16)

    def close(self) -> None:
        """Close it. The system sends SIGHUP to all its processes."""
        os.close(self._ours)


def _num_steps(path: Path) -> int:
    return sum("time/step_seconds" in line for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(INPROC, id="inproc"),
        pytest.param(["cluster=cpu-1x2"], id="ray", marks=[pytest.mark.ray, pytest.mark.long]),
    ],
)
def test_a_run_whose_terminal_is_closed_is_saved(options: list[str], tmp_path: Path) -> None:
    terminal = Terminal(command(talkative(tmp_path), tmp_path, "steps=100000", *options))
    terminal.wait_for_steps(tmp_path, 1)
    processes = psutil.Process(terminal.child.pid).children(recursive=True)
    terminal.close()
    assert terminal.child.wait(SECONDS) == 75
    summary = summary_of(tmp_path)
    assert summary["reason"] == "stopped"
    (latest,) = tmp_path.glob("*/2*/checkpoints/latest")
    assert verify_checkpoint(latest) == summary["steps"]
    assert psutil.wait_procs(processes, timeout=60)[1] == []


def test_nohup_keeps_a_run() -> None:
    assert signal.SIGHUP in stop_signals()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
