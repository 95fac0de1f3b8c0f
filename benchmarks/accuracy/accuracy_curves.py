"""Held-out accuracy by step of the additions: by loss, and by what is trained and how.

    python -m benchmarks.accuracy.accuracy_curves runs.jsonl --seeds 0 1
    python -m benchmarks.accuracy.accuracy_curves runs.jsonl --summarize

Policies: `recipes/grpo.py` with 32 prompts x 8 samples a step, and another node in the place of
`nodes.actor_train`. Preferences: `recipes/dpo.py` with another `nodes.dpo.loss`. Updates: the first of the
policies with another optimizer, or with adapters. Optimizers: `recipes/sft.py` from random weights, with
another optimizer. All else is that of the recipe, the learning rate too but for adapters and SGD, and but for
optimizers from the checkpoint that comes with hflow. Each finished run is a line of `runs.jsonl`, so that a
sweep that is killed continues. The figure needs matplotlib.
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
OPTIM = "models.actor.optim"
LORA = ("models.actor.lora={r: 16, alpha: 32}", f"{OPTIM}.lr=3e-3")
DORA, MEGATRON = (*LORA, "models.actor.lora.dora=true"), "models.actor.backend=megatron"
UPDATES = {
    "adamw": (),
    "muon": (f"{OPTIM}.name=muon",),
    "lora": LORA,
    "lora, megatron": (*LORA, MEGATRON),
    "dora": DORA,
    "dora, megatron": (*DORA, MEGATRON),
    "dora, micro-batches": (*DORA, "models.actor.tokens_per_microbatch=200"),
}
"""What is trained and how -> settings."""
TASKS: dict[str, dict[str, tuple[str, ...]]] = {
    "policies": dict.fromkeys(POLICIES, ()),
    "preferences": {loss: (f"nodes.dpo.loss={loss}",) for loss in PREFERENCES},
    "updates": UPDATES,
    "optimizers": {
        "adamw": (),
        "adamw_8bit": (f"{OPTIM}.name=adamw_8bit",),
        "muon": (f"{OPTIM}.name=muon",),
        "sgd": (f"{OPTIM}.name=sgd", f"{OPTIM}.momentum=0.9", f"{OPTIM}.lr=0.1"),
    },
}
STEPS = {"policies": 100, "preferences": 150, "updates": 100, "optimizers": 300}
RECIPES = {"preferences": "dpo", "optimizers": "sft"}
"""Recipes other than grpo."""


def run(task: str, case: str, seed: int) -> list[tuple[int, float]]:
    """Run a recipe and return its accuracy by step."""
    name = RECIPES.get(task, "grpo")
    with tempfile.TemporaryDirectory() as out:
        recipe = Path(out) / f"{name}.py"
        text = (ROOT / "recipes" / f"{name}.py").read_text()
        node = case if task == "policies" else "actor_train"
        recipe.write_text(text.replace("nodes.actor_train, actor", f"nodes.{node}, actor"))
        recipe.with_suffix(".yaml").write_text((ROOT / "recipes" / f"{name}.yaml").read_text())
        settings = ["batch=32"] if name == "grpo" else []
        settings += ["workers=inproc", "cluster=cpu-1x1", f"out={out}", f"seed={seed}", "save_every=100000"]
        settings += [f"steps={STEPS[task]}", f"nodes.eval_gen.every={STEPS[task] // 5}"]
        changed = {setting.partition("=")[0]: setting for setting in (*settings, *TASKS[task][case])}
        command = [sys.executable, "-m", "hflow", "run", str(recipe), "--plain", *changed.values()]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, env=env)
        (metrics,) = Path(out).glob("*/2*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(row["step"], row["eval_gen/accuracy"]) for row in rows if "eval_gen/accuracy" in row]


def is_same_run(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two cases run the same command: AdamW is the first of the policies."""
    first, second = (
        (
            RECIPES.get(case["task"], "grpo"),
            case["case"] if case["task"] == "policies" else POLICIES[0],
            STEPS[case["task"]],
            TASKS[case["task"]][case["case"]],
        )
        for case in (one, other)
    )
    return first == second


def means(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the accuracy of each case of a task by step, as the mean over seeds, and all at the end."""
    found = {}
    for case in dict.fromkeys(line["case"] for line in lines):
        curves = [line["accuracy"] for line in lines if line["case"] == case]
        found[case] = {
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

    figure, panels = plt.subplots(1, len(summary), figsize=(15.0, 3.8), layout="constrained", sharey=True)
    for axes, (task, cases) in zip(panels, summary.items(), strict=True):
        for case, curve in cases.items():
            style = "--" if "megatron" in case else "-"
            axes.plot(curve["steps"], curve["accuracy"], label=case, linestyle=style)
        axes.set(xlabel="step", title=f"held-out accuracy, {task}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path, help="JSONL of finished runs, which the sweep continues")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--cases", nargs="+", help="only these of the tasks")
    parser.add_argument("--summarize", action="store_true", help="write the result of the finished runs only")
    args = parser.parse_args()
    lines = harness.read_lines(args.runs)
    for seed in [] if args.summarize else args.seeds:
        for task in args.tasks:
            for case in args.cases or TASKS[task]:
                key = {"task": task, "case": case, "seed": seed}
                if not any(key.items() <= line.items() for line in lines):
                    same = [line for line in lines if line["seed"] == seed and is_same_run(line, key)]
                    lines.append({**key, "accuracy": same[0]["accuracy"] if same else run(task, case, seed)})
                    harness.append_line(args.runs, lines[-1])
                    print(key, lines[-1]["accuracy"], flush=True)
    of_task = {task: [line for line in lines if line["task"] == task] for task in STEPS}
    summary = {task: means(found) for task, found in of_task.items() if found}
    path = harness.write(
        "accuracy-curves", {"what": __doc__.splitlines()[0], "summary": summary, "runs": lines}
    )
    draw(summary, path.with_suffix(".svg"))
    print(json.dumps(summary, indent=1), path, sep="\n")


if __name__ == "__main__":
    main()
