"""How long `hflow run` takes to its first line, to workers that are ready, and to the evaluation at step 0.

A step of `recipes/grpo.py` from random weights, in one process and on Ray with two workers. Beside it, in
turn, what no run can do without: a process that imports what a worker imports, and plain Ray with two actors
that do so at the same time. None of them counts its exit, which frees what was imported for a second.

    python -m benchmarks.speed.start_up --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lib import harness

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.py"
MOMENTS = {"first line": "", "workers are ready": "workers are ready", "step 0": "step 0/"}
"""Name of a moment -> what is in the line that is printed then."""
IMPORTS = "import torch; from transformers.models.qwen2 import modeling_qwen2"
PLAIN_RAY = f"""
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
@ray.remote
class Actor:
    def load(self):
        {IMPORTS}
ray.get([actor.load.remote() for actor in [Actor.remote(), Actor.remote()]])
"""


def run(workers: str) -> dict[str, Any]:
    """Return the seconds of `hflow run` to each moment."""
    with tempfile.TemporaryDirectory() as out:
        options = [str(RECIPE), "models.actor.path=null", "steps=1", f"workers={workers}", f"out={out}"]
        return measure(["-m", "hflow", "run", *options])


def limit(code: str) -> dict[str, Any]:
    """Return the seconds of a program."""
    return measure(["-c", f"{code}\nprint('step 0/')"])


def measure(arguments: list[str]) -> dict[str, Any]:
    """Return seconds from the start of Python to each moment, and processor seconds of this process alone."""
    seconds: dict[str, Any] = {}
    start = time.monotonic()
    child = subprocess.Popen([sys.executable, "-u", *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    process = psutil.Process(child.pid)
    for line in child.stdout:
        for moment, part in MOMENTS.items():
            if part in line and moment not in seconds:
                seconds[moment] = time.monotonic() - start
                seconds[f"{moment}, processor"] = sum(process.cpu_times()[:2])
    if child.wait() != 0:
        raise RuntimeError(f"{arguments} ended with status {child.returncode}")
    return seconds


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    measures = {
        "one process": partial(run, "inproc"),
        "imports": partial(limit, IMPORTS),
        "Ray, two workers": partial(run, "ray"),
        "plain Ray with imports": partial(limit, PLAIN_RAY),
    }
    rows = harness.interleave(measures, args.rounds)
    medians = {
        name: {moment: statistics.median(row[moment] for row in found) for moment in found[0]}
        for name, found in rows.items()
    }
    print(json.dumps(medians, indent=2))
    harness.write("start-up", {"arguments": harness.numbers(args), "medians": medians, "rounds": rows})


if __name__ == "__main__":
    main()
