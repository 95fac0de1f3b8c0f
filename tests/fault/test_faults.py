"""Processes of a run that end at random moments: it continues by itself, or is resumed, and loses nothing.

3 kills of PPO in one process, at file operations of checkpoints or random times; 6 of an asynchronous run,
and 4 in a run on Ray with one worker (long). `make chaos N=200` disturbs runs of two workers, with all kinds
of faults.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_python
import pytest

HERE = Path(__file__).parent


def results_of(script: str, out: Path, *options: str) -> list[dict[str, Any]]:
    """Run a script in a process of its own, which adopts what runs leave behind, and return its results."""
    command = [sys.executable, HERE / script, *options, "--out", out]
    ended = forked_python.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert out.is_file(), ended.stdout[-3000:]
    results: list[dict[str, Any]] = json.loads(out.read_text())
    assert [problem for result in results for problem in result["problems"]] == []
    assert ended.returncode == 0
    return results


@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", ["ppo", pytest.param("grpo_async", marks=pytest.mark.long)])
def test_a_run_in_one_process_continues_wherever_it_is_killed(run: str, tmp_path: Path):
    options = ("--kills", "3" if run == "ppo" else "6", "--seed", "5", "--run", run)
    results = results_of("inproc_chaos.py", tmp_path / f"{run}.json", *options)
    attempts = [attempt for result in results for attempt in result["attempts"]]
    killed = [attempt for attempt in attempts if attempt["exit_code"] < 0]
    assert len(killed) >= int(options[1])
    assert any("checkpoints/.step-" in attempt["last_operation"] for attempt in killed)


@pytest.mark.long  # Ray's own agents outlive a killed controller now and then, which fails it
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_run_on_ray_survives_its_processes(tmp_path: Path, no_ray: None):
    """Its worker dies, and again while it restarts; a reward's process, and the controller in a save."""
    faults = ("worker-kill-step", "worker-kill-soon", "reward-kill-step", "controller-kill-save")
    options = [option for fault in faults for option in ("--fault", fault)]
    (result,) = results_of("chaos.py", tmp_path / "results.json", "--recipe", "small_ppo", *options)
    assert [strike["fault"] for strike in result["strikes"]] == [
        *("kill worker", "kill worker", "kill reward", "kill controller")
    ]
    assert result["restarts"] >= 1
    assert result["exit_codes"] == [-9, 0]
