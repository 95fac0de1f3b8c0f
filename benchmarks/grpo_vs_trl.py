"""Samples per second of recipes/grpo.py against TRL's GRPOTrainer; whole runs, A B A B.

python benchmarks/grpo_vs_trl.py --peer .venv-peers/bin/python --model CHECKPOINT
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

HERE = Path(__file__).parent
WARMUP = 3


def hflow_run(model: str, steps: int, extra: list[str]) -> dict[str, Any]:
    """Run the recipe without evaluations; return the median step after the warm-up."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "hflow", "run", str(HERE.parent / "recipes" / "grpo.py")]
        command += [f"models.actor.path={model}", f"steps={steps}", f"out={out}", "save_every=100000"]
        command += ["nodes.eval_gen.after=100000", *extra]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (metrics,) = Path(out).glob("*/2*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    times = [row["time/step_seconds"] for row in rows if "time/step_seconds" in row][WARMUP:]
    seconds = statistics.median(times)
    return {"step_seconds": seconds, "samples_per_second": 512 / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True, help="python of an environment with TRL")
    parser.add_argument("--model", required=True, help="HF checkpoint directory of the recipe's actor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    trl = [args.peer, str(HERE / "peers" / "trl_grpo.py"), args.model, str(args.steps), "2"]
    rows = harness.interleave(
        {
            "trl": lambda: harness.run_once(trl, {"OMP_NUM_THREADS": "2"}),
            "hflow_ray_d2": lambda: hflow_run(args.model, args.steps, []),
            "hflow_inproc_d1": lambda: hflow_run(
                args.model, args.steps, ["workers=inproc", "cluster=cpu-1x1"]
            ),
        },
        args.rounds,
    )
    summary = harness.compare(rows, "samples_per_second", "trl")
    content = {"what": "64 prompts x 8 samples, 4 new tokens, two updates a step", "summary": summary}
    path = harness.write("grpo-vs-trl", {**content, "config": harness.numbers(args), "rows": rows})
    print(json.dumps(summary, indent=2), path, sep="\n")


if __name__ == "__main__":
    main()
