"""What the second core brings: steps of recipes/grpo.py by one worker and by two.

    python -m benchmarks.speed.second_core [--sizes tiny 19m] [--rounds 3]

Random Qwen2 models and answers as in `peers.py`, one thread per worker. One worker runs in the controller's
process on one core, or in a process of Ray, as two workers do; Ray's processes use two cores. Seconds of the
clock, so the machine must be idle.
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
from benchmarks.speed.peers import GRPO, HERE, SIZES, WARMUP, make_model, step_overrides

WORKERS = {
    "one": (1, ["workers=inproc", "cluster=cpu-1x1"]),
    "one on Ray": (2, ["workers=ray", "cluster=cpu-1x1"]),
    "two": (2, ["workers=ray", "cluster=cpu-1x2"]),
}
"""Runs, their cores, and what differs in their configuration."""


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
        overrides = [*step_overrides(model, GRPO[size], out), *WORKERS[run][1]]
        compiled = compile_recipe(HERE.parents[1] / "recipes" / "grpo.py", overrides)
        run_compiled(replace(compiled, observers=(Clock(),)), False)
    seconds = [end - start for start, end in zip(ends[WARMUP:], ends[WARMUP + 1 :], strict=False)]
    print(json.dumps({"seconds": statistics.median(seconds), "steps": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs=3, metavar=("RUN", "MODEL", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        run, model, size = args.serve
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: WORKERS[run][0]])
        serve(run, Path(model), size)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, Any] = {"configuration": harness.numbers(args)}
    with tempfile.TemporaryDirectory() as directory:
        for size in args.sizes:
            model = Path(directory) / size
            make_model(model, size)
            runs = {
                run: lambda run=run, model=model, size=size: harness.run_once(  # type: ignore[misc]
                    [sys.executable, "-m", __spec__.name, "--serve", run, str(model), size]
                )
                for run in WORKERS
            }
            rows = harness.interleave(runs, args.rounds)
            found[size] = {"summary": harness.compare(rows, "seconds", "two"), "rows": rows}
            print(size, json.dumps(found[size]["summary"]), flush=True)
    print(harness.write("second-core", found))


if __name__ == "__main__":
    main()
