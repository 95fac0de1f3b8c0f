"""What the second core brings: steps of recipes/grpo.py by two threads, and by two workers.

    python -m benchmarks.speed.second_core [--sizes tiny 19m smollm2] [--rounds 3]

Models as in `peers.py`, 64 answers a step. One worker runs in the controller's process with one thread or
two, or in a process of Ray with one, as each of two workers does; Ray's processes use two cores. Seconds of
the clock, so the machine must be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib import harness
from benchmarks.speed.peers import GRPO, HERE, REAL, SIZES, WARMUP, model_of, step_overrides

CASES = {name: GRPO[name] for name in SIZES} | {REAL: replace(GRPO[REAL], prompts=8, max_tokens=24, steps=6)}
WORKERS = {
    "one": (1, 1, ["workers=inproc", "cluster=cpu-1x1"]),
    "two threads": (2, 2, ["workers=inproc", "cluster=cpu-1x1"]),
    "one on Ray": (2, 1, ["workers=ray", "cluster=cpu-1x1"]),
    "two": (2, 1, ["workers=ray", "cluster=cpu-1x2"]),
}
"""Runs, their cores, the threads of a worker, and what differs in their configuration."""


def serve(run: str, model: Path, size: str) -> None:
    """Do a run; print the median seconds of a step."""
    from hflow import Observer
    from hflow.launch.planning.compile import compile_recipe
    from hflow.launch.running.run_recipe import run_compiled

    ends: list[float] = []

    class Clock(Observer):
        def on_step(self, step: int, values: Mapping[str, float]) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as out:
        overrides = [*step_overrides(model, CASES[size], out), *WORKERS[run][2]]
        compiled = compile_recipe(HERE.parents[1] / "recipes" / "grpo.py", overrides)
        run_compiled(replace(compiled, observers=(Clock(),)), False)
    seconds = [end - start for start, end in zip(ends[WARMUP:], ends[WARMUP + 1 :], strict=False)]
    print(json.dumps({"seconds": statistics.median(seconds), "steps": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs=3, metavar=("RUN", "MODEL", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        run, model, size = args.serve
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: WORKERS[run][0]])
        serve(run, Path(model), size)
        return
    found: dict[str, Any] = {"configuration": harness.numbers(args)}
    with tempfile.TemporaryDirectory() as directory:
        for size in args.sizes:
            model = model_of(size, Path(directory))
            runs = {
                run: lambda run=run, model=model, size=size: harness.run_once(  # type: ignore[misc]
                    [sys.executable, "-m", __spec__.name, "--serve", run, str(model), size],
                    {"OMP_NUM_THREADS": str(WORKERS[run][1])},
                )
                for run in WORKERS
            }
            rows = harness.interleave(runs, args.rounds)
            found[size] = {
                "summary": harness.compare(rows, "seconds", "one"),
                "rows": rows,
                "load": os.getloadavg(),
            }
            print(size, json.dumps(found[size]["summary"]), flush=True)
    print(harness.write("second-core", found))


if __name__ == "__main__":
    main()
