"""How long separate engines sleep for new weights while the trainer's device is busy, and seconds per step.

    python -m benchmarks.speed.async_weights [--pause 0.6] [--label after]

`benchmarks/speed/recipes/async_pause.py`: a batch node takes the trainer's device at the start of each
step. Another version of hflow is measured with its directory in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.lib import harness
from hflow import launch

RECIPE = Path(__file__).parent / "recipes" / "async_pause.py"
ENGINE = "actor@gen"


def measure(args: argparse.Namespace, staleness: int) -> dict[str, Any]:
    """One run: means over the steps after the first few."""
    with tempfile.TemporaryDirectory() as out:
        overrides = [
            f"out={out}",
            f"steps={args.steps}",
            f"batch={args.batch}",
            f"nodes.pause.seconds={args.pause}",
            f"schedule.max_staleness={staleness}",
        ]
        directory = launch.run(RECIPE, overrides, live=False).directory
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        spans = json.loads((directory / "trace.json").read_text())["traceEvents"]
    steps = [row for row in rows if "time/step_seconds" in row][args.skip :]
    return {
        "max_staleness": staleness,
        "step_seconds": statistics.fmean(row["time/step_seconds"] for row in steps),
        "busy_engines": statistics.fmean(row["busy/engines"] for row in steps),
        "staleness_mean": statistics.fmean(row["staleness/mean"] for row in steps),
        **asleep(spans, args.skip),
    }


def asleep(spans: list[dict[str, Any]], skip: int) -> dict[str, float]:
    """Seconds between two turns of the engine: the median, and their share of the time."""
    turns = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if s["name"] == f"generate {ENGINE}")[skip:]
    gaps = [start - end for (_, end), (start, _) in pairwise(turns)]
    return {
        "asleep_seconds": statistics.median(gaps) / 1e6,
        "asleep_share": sum(gaps) / (turns[-1][1] - turns[0][0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--staleness", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--skip", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pause", type=float, default=0.6)
    parser.add_argument("--label", default="after")
    args = parser.parse_args()
    runs = [measure(args, staleness) for staleness in args.staleness]
    path = harness.write(f"async-weights-{args.label}", {"config": vars(args), "runs": runs})
    print(json.dumps(runs, indent=2), path, sep="\n")


if __name__ == "__main__":
    main()
