"""Throughput of asynchronous runs beside the limit, with a real engine and a real trainer on one core each.

    python benchmarks/async_vs_sync.py

`recipes/grpo_async.py` with responses of random length (random weights, which learn nothing). The
synchronous run says how long generation and training take alone (`busy/engines` and `busy/trainers`); no
schedule is faster than the longer of the two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import harness

from hflow import launch

RECIPE = Path(__file__).parents[1] / "recipes" / "grpo_async.py"


def overrides(args: argparse.Namespace, staleness: int, out: str) -> list[str]:
    return [
        f"out={out}",
        f"steps={args.steps}",
        f"batch={args.batch}",
        f"schedule.max_staleness={staleness}",
        f"schedule.max_concurrent={args.concurrent}",
        f"models.actor.gen.max_running={args.slots}",
        f"nodes.actor_gen.max_tokens={args.max_tokens}",
        "nodes.actor_train.prox=loglinear",
        "nodes.actor_train.minibatches=1",
        "nodes.eval_gen.after=1000000",
        "data.heldout.limit=1",
        "models.actor.path=null",
        "models.actor.optim.lr=0",
        "cores=[1]",
    ]


def measure(args: argparse.Namespace, staleness: int) -> dict[str, Any]:
    """Medians over the steps after the first few."""
    with tempfile.TemporaryDirectory() as out:
        summary = launch.run(RECIPE, overrides(args, staleness, out), live=False)
        rows = [json.loads(line) for line in (summary.directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step_seconds" in row][args.skip :]
    seconds = sum(row["time/step_seconds"] for row in steps) / len(steps)

    def alone(name: str) -> float:
        return sum(row[name] * row["time/step_seconds"] for row in steps) / len(steps)

    return {
        "max_staleness": staleness,
        "step_seconds": seconds,
        "generation_seconds": alone("busy/engines"),
        "training_seconds": alone("busy/trainers"),
        "staleness_mean": statistics.fmean(row["staleness/mean"] for row in steps),
        "staleness_max": max(row["staleness/max"] for row in steps),
        "dropped": sum(row.get("dropped/stale", 0) for row in steps),
        "tokens_per_step": statistics.fmean(row["batch/tokens"] for row in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--concurrent", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2, help="interleaved")
    args = parser.parse_args()
    runs = [measure(args, staleness) for _ in range(args.rounds) for staleness in args.staleness]
    rows = []
    alone = [run for run in runs if run["max_staleness"] == 0]
    limit = statistics.median(max(run["generation_seconds"], run["training_seconds"]) for run in alone)
    for staleness in args.staleness:
        same = [run for run in runs if run["max_staleness"] == staleness]
        row = {key: statistics.median(run[key] for run in same) for key in same[0]}
        rows.append({**row, "share_of_limit": limit / row["step_seconds"]})
    path = harness.write(
        "async-vs-sync", {"config": vars(args), "limit_seconds": limit, "summary": rows, "runs": runs}
    )
    print(json.dumps(rows, indent=2), path, sep="\n")


if __name__ == "__main__":
    main()
