"""Accuracy by staleness and loss: GRPO on samples that are as stale as the schedule allows.

    python benchmarks/staleness_ablation.py                          # 36 runs, three at a time
    python benchmarks/staleness_ablation.py --draw results/FILE.json   # only the picture

Every seed starts from a supervised checkpoint of its own. Naive: PPO's clipping around stale log-probs of the
weights that generated the tokens (`prox=none`). Decoupled clips around the step's weights and weighs by
prox / behav (`prox=recompute`). Nothing else differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness

ROOT = Path(__file__).parents[1]
STALE = "benchmarks/recipes/stale_grpo.py"
LOSSES = {"naive": "none", "decoupled": "recompute"}
SECONDS_AHEAD = 1.0
"""Head start of the engine, for each batch that the schedule lets it run ahead."""


def run(recipe: str, *overrides: str) -> list[dict[str, Any]]:
    """Run a recipe; return the rows of its metrics."""
    out = next(o for o in overrides if o.startswith("out=")).removeprefix("out=")
    directory = Path(out) / Path(recipe).stem / "latest"
    if not (directory / "summary.json").exists():
        command = [sys.executable, "-m", "hflow", "run", recipe, *overrides]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    metrics = directory / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def measure(
    root: str, seed: int, staleness: int, loss: str, steps: int, overrides: list[str]
) -> dict[str, Any]:
    rows = run(
        STALE,
        f"out={root}/{seed}-{staleness}-{loss}",
        f"seed={seed}",
        f"models.actor.path={root}/sft{seed}/sft/latest/checkpoints/latest/actor",
        f"steps={steps}",
        f"schedule.max_staleness={staleness}",
        f"nodes.actor_train.prox={LOSSES[loss]}",
        f"nodes.slow_advantage.first={SECONDS_AHEAD * staleness}",
        *overrides,
    )
    trained = [row for row in rows if "staleness/mean" in row]
    full = trained[staleness + 1 :]  # the first batches are younger: there are no older weights yet
    curve = [(row["step"], row["eval_gen/accuracy"]) for row in rows if "eval_gen/accuracy" in row]
    found = {
        "seed": seed,
        "max_staleness": staleness,
        "loss": loss,
        "accuracy": curve[-1][1],
        "mean": statistics.fmean(accuracy for _, accuracy in curve),
        "staleness": statistics.fmean(row["staleness/mean"] for row in full),
        "staleness_max": max(row["staleness/max"] for row in trained),
        "curve": curve,
    }
    print({key: value for key, value in found.items() if key != "curve"}, flush=True)
    return found


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and range over seeds of each cell."""
    cells = sorted({(run["max_staleness"], run["loss"]) for run in runs})
    table = []
    for staleness, loss in cells:
        same = [run for run in runs if (run["max_staleness"], run["loss"]) == (staleness, loss)]
        accuracies = [run["accuracy"] for run in same]
        table.append(
            {
                "max_staleness": staleness,
                "loss": loss,
                "reached": statistics.fmean(run["staleness"] for run in same),
                "accuracy": statistics.fmean(accuracies),
                "lowest": min(accuracies),
                "highest": max(accuracies),
                "on_the_way": statistics.fmean(accuracy for run in same for _, accuracy in run["curve"]),
            }
        )
    return table


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Accuracy by the staleness that was reached, one colour a loss.

    At the end, with bars from the lowest to the highest seed; dashed, the mean over the run.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.0, 3.6), layout="constrained")
    for loss in LOSSES:
        rows = [row for row in table if row["loss"] == loss]
        means = [row["accuracy"] for row in rows]
        spread = [
            [row["accuracy"] - row["lowest"] for row in rows],
            [row["highest"] - row["accuracy"] for row in rows],
        ]
        reached = [row["reached"] for row in rows]
        bars = axes.errorbar(reached, means, spread, marker="o", capsize=3, label=f"{loss}, at the end")
        color = bars.lines[0].get_color()
        axes.plot(
            reached, [row["on_the_way"] for row in rows], "--", color=color, label=f"{loss}, mean of the run"
        )
    axes.set_xscale("symlog", base=2, linthresh=1)
    ticks = sorted({row["max_staleness"] for row in table})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(xlabel="mean lag of trained samples (versions)", ylabel="held-out accuracy", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--keep", help="a directory for the runs; what is complete there is not run again")
    parser.add_argument("--draw", type=Path, help="a result, to draw again without any run")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.draw.read_text())["summary"], args.draw.with_suffix(".svg"))
        return
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.at_once) as pool:
        root = args.keep or temporary
        list(pool.map(lambda s: run("recipes/sft.py", f"out={root}/sft{s}", f"seed={s}"), args.seeds))
        cells = itertools.product(args.seeds, args.staleness, LOSSES)
        runs = list(pool.map(lambda cell: measure(root, *cell, args.steps, args.overrides), cells))
    table = summarize(runs)
    config = {"seeds": args.seeds, "steps": args.steps, "overrides": args.overrides}
    path = harness.write("staleness-ablation", {"config": config, "summary": table, "runs": runs})
    draw(table, path.with_suffix(".svg"))
    print(json.dumps(table, indent=2), path, sep="\n")


if __name__ == "__main__":
    main()
