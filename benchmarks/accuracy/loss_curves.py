"""Held-out accuracy by step of the additions, loss by loss.

    python -m benchmarks.accuracy.loss_curves runs.jsonl --seeds 0 1
    python -m benchmarks.accuracy.loss_curves runs.jsonl --summarize

Policies: `recipes/grpo.py` with 32 prompts x 8 samples a step, and another node in the place of
`nodes.actor_train`. Preferences: `recipes/dpo.py` with another `nodes.dpo.loss`. All else is that of the
recipe, the learning rate too, from the checkpoint that comes with hflow. Each finished run is a line of
`runs.jsonl`, so that a sweep that is killed continues. The figure needs matplotlib.
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

ROOT = Path(__file__).parents[2]
POLICIES = ("actor_train", "cispo_train", "sapo_train", "vespo_train", "high_entropy_train")
PREFERENCES = ("sigmoid", "ipo", "hinge", "nca_pair", "apo_zero")
STEPS = {"policies": 100, "preferences": 150}


def run(task: str, loss: str, seed: int) -> list[tuple[int, float]]:
    """Run a recipe with a loss and return its accuracy by step."""
    name = {"policies": "grpo", "preferences": "dpo"}[task]
    with tempfile.TemporaryDirectory() as out:
        recipe = Path(out) / f"{name}.py"
        text = (ROOT / "recipes" / f"{name}.py").read_text()
        recipe.write_text(text.replace("nodes.actor_train, actor", f"nodes.{loss}, actor"))
        recipe.with_suffix(".yaml").write_text((ROOT / "recipes" / f"{name}.yaml").read_text())
        settings = {"policies": ["batch=32"], "preferences": [f"nodes.dpo.loss={loss}"]}[task]
        settings += ["workers=inproc", "cluster=cpu-1x1", f"out={out}", f"seed={seed}", "save_every=100000"]
        settings += [f"steps={STEPS[task]}", f"nodes.eval_gen.every={STEPS[task] // 5}"]
        command = [sys.executable, "-m", "hflow", "run", str(recipe), "--plain", *settings]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, env=env)
        (metrics,) = Path(out).glob("*/2*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(row["step"], row["eval_gen/accuracy"]) for row in rows if "eval_gen/accuracy" in row]


def means(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the accuracy of each loss of a task by step, as the mean over seeds, and all at the end."""
    found = {}
    for loss in dict.fromkeys(line["loss"] for line in lines):
        curves = [line["accuracy"] for line in lines if line["loss"] == loss]
        found[loss] = {
            "steps": [step for step, _ in curves[0]],
            "accuracy": [round(statistics.fmean(y for _, y in at), 4) for at in zip(*curves, strict=True)],
            "at_the_end": [curve[-1][1] for curve in curves],
        }
    return found


def draw(summary: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the means of each task in a panel of its own."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(summary), figsize=(11.0, 3.8), layout="constrained", sharey=True)
    for axes, (task, losses) in zip(panels, summary.items(), strict=True):
        for loss, curve in losses.items():
            axes.plot(curve["steps"], curve["accuracy"], label=loss)
        axes.set(xlabel="step", title=f"held-out accuracy, {task}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path, help="JSONL of finished runs, which the sweep continues")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--summarize", action="store_true", help="write the result of the finished runs only")
    args = parser.parse_args()
    lines = harness.read_lines(args.runs)
    for seed in [] if args.summarize else args.seeds:
        for task, losses in (("policies", POLICIES), ("preferences", PREFERENCES)):
            for loss in losses:
                key = {"task": task, "loss": loss, "seed": seed}
                if not any(key.items() <= line.items() for line in lines):
                    lines.append({**key, "accuracy": run(task, loss, seed)})
                    harness.append_line(args.runs, lines[-1])
                    print(key, lines[-1]["accuracy"], flush=True)
    summary = {task: means([line for line in lines if line["task"] == task]) for task in STEPS}
    path = harness.write("loss-curves", {"what": __doc__.splitlines()[0], "summary": summary, "runs": lines})
    draw(summary, path.with_suffix(".svg"))
    print(json.dumps(summary, indent=1), path, sep="\n")


if __name__ == "__main__":
    main()
