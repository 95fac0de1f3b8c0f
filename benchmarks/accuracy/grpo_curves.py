"""Reward, KL and held-out accuracy of GRPO beside TRL's GRPOTrainer: same model, data, settings and seeds.

    python -m benchmarks.accuracy.grpo_curves runs.jsonl --peer .venv-peers/bin/python --seeds 0 1 2 3 4
    python -m benchmarks.accuracy.grpo_curves runs.jsonl --summarize

Each finished run is a line of `runs.jsonl`, so that a sweep that is killed continues. Both start from the
checkpoint that comes with hflow, and train 32 prompts x 8 samples a step in two updates, with the optimizer
settings of `benchmarks/accuracy/recipes/grpo_kl.yaml`. They differ in the order of prompts and in random
numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib import harness

HERE = Path(__file__).parent
CHECKPOINT = HERE.parents[1] / "configs" / "checkpoints" / "addition"
EVERY, LR = 20, 2e-4
FIGURES = {
    "reward": "reward of samples",
    "kl": "KL to the start (nats a token)",
    "accuracy": "held-out accuracy",
}


def hflow_run(steps: int, seed: int) -> dict[str, Any]:
    """Run `benchmarks/accuracy/recipes/grpo_kl.py` and return its curves."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "hflow", "run", str(HERE / "recipes" / "grpo_kl.py"), "--plain"]
        command += ["workers=inproc", f"out={out}", f"steps={steps}", f"seed={seed}", "save_every=100000"]
        command += [f"models.actor.optim.lr={LR}", f"nodes.eval_gen.every={EVERY}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
        (metrics,) = Path(out).glob("*/2*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    trained = [row for row in rows if "actor_train/ref_kl" in row]
    return {
        "reward": [row["actor_gen/reward"] for row in trained],
        "kl": [row["actor_train/ref_kl"] for row in trained],
        "accuracy": [(row["step"], row["eval_gen/accuracy"]) for row in rows if "eval_gen/accuracy" in row],
    }


def trl_run(peer: str, steps: int, seed: int) -> dict[str, Any]:
    """Run TRL on the rows of the same dataset and return its curves."""
    asked = {"model": str(CHECKPOINT), "steps": steps, "every": EVERY, "seed": seed, "lr": LR}
    asked |= {split: addition_rows(split) for split in ("train", "heldout")}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [peer, str(HERE / "peers" / "trl_curve.py")]
    done = subprocess.run(
        command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True, env=env
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def addition_rows(split: str) -> list[dict[str, str]]:
    """Return the rows of the addition data."""
    from hflow.data.rows.addition import Addition
    from hflow.data.rows.row_schema import RowSchema
    from hflow.types import Unit

    rows = Addition(split, RowSchema({"prompt": Unit.TEXT, "answer": Unit.TEXT}))
    return [rows.row(index) for index in range(len(rows))]


def summarize(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the accuracy of each program at the end: mean, standard deviation and range over seeds."""
    summary = {}
    for program in sorted({line["program"] for line in lines}):
        last = [line["accuracy"][-1][1] for line in lines if line["program"] == program]
        summary[program] = {
            "seeds": len(last),
            "accuracy": statistics.fmean(last),
            "deviation": statistics.stdev(last) if len(last) > 1 else None,
            "range": [min(last), max(last)],
        }
    return summary


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each figure: the mean over seeds, and the range as a band."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(FIGURES), figsize=(13.0, 3.6), layout="constrained")
    for axes, (name, label) in zip(panels, FIGURES.items(), strict=True):
        for program in sorted({line["program"] for line in lines}):
            curves = [line[name] for line in lines if line["program"] == program]
            points = [c if name == "accuracy" else list(enumerate(smooth(c), 1)) for c in curves]
            steps = [step for step, _ in points[0]]
            at_step = list(zip(*([value for _, value in curve] for curve in points), strict=True))
            axes.plot(steps, [statistics.fmean(values) for values in at_step], label=program)
            axes.fill_between(steps, [min(v) for v in at_step], [max(v) for v in at_step], alpha=0.2)
        axes.set(xlabel="step", title=label)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def smooth(values: list[float], window: int = 5) -> list[float]:
    """Return means over the last few steps."""
    return [statistics.fmean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path, help="JSONL of finished runs, which the sweep continues")
    parser.add_argument("--peer", help="python of an environment with TRL")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--summarize", action="store_true", help="write the result of the finished runs only")
    args = parser.parse_args()
    if not args.summarize and args.peer is None:
        parser.error("--peer is missing: the python of an environment with TRL")
    lines = harness.read_lines(args.runs)
    for seed in [] if args.summarize else args.seeds:
        for program in ("hflow", "trl"):
            key = {"program": program, "seed": seed, "steps": args.steps}
            if not any(key.items() <= line.items() for line in lines):
                is_peer = program == "trl"
                curves = trl_run(args.peer, args.steps, seed) if is_peer else hflow_run(args.steps, seed)
                lines.append({**key, **curves})
                harness.append_line(args.runs, lines[-1])
                print(key, lines[-1]["accuracy"], flush=True)
    content = {"what": "32 prompts x 8 samples, two updates a step, KL weight 0.01", "lr": LR}
    path = harness.write("grpo-curves", {**content, "summary": summarize(lines), "runs": lines})
    draw(lines, path.with_suffix(".svg"))
    print(json.dumps(summarize(lines), indent=2), path, sep="\n")


if __name__ == "__main__":
    main()
