"""What each shipped recipe of additions reaches, for the tables of README and recipes/README.md.

python -m benchmarks.accuracy.recipe_accuracy --out benchmarks/results/recipe-accuracy.json
python -m benchmarks.accuracy.recipe_accuracy --out ... grpo ppo        # these alone, measured again

Every run is one process, from the checkpoint that its YAML names. A finished run is written at once, and a
second call does what is missing, so the table can be made in pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ONE_DEVICE = ["workers=inproc", "cluster=cpu-1x1"]
TWO_DEVICES = ["workers=inproc", "cluster=cpu-1x2"]
SEEDS: dict[str, list[int]] = {name: [0, 1, 2] for name in ("sft", "grpo", "ppo", "grpo_async", "ppo_async")}
RECIPES = [
    *SEEDS,
    *["grpo_chat", "rloo", "remax", "reinforce_pp", "dr_grpo", "dapo", "cispo", "mis", "gspo", "dpo"],
    *["reward_model", "distill", "tool_sft", "tool_agent", "openai_agent", "self_play"],
    *["custom/ema_teacher", "custom/retrieval", "custom/replay", "custom/sft_rl"],
]
NEEDS_TEACHER = ("distill",)
"""Recipes whose teacher is a result of `grpo.py`."""


def overrides(recipe: str, teacher: str) -> list[str]:
    """What the recipe needs beside its YAML."""
    devices = TWO_DEVICES if recipe in ("grpo_async", "ppo_async", "mis") else ONE_DEVICE
    return [*devices, f"models.teacher.path={teacher}"] if recipe in NEEDS_TEACHER else devices


def run(recipe: str, seed: int, out: Path, teacher: str) -> dict[str, Any]:
    """Run a recipe to its end and return what its summary says."""
    command = [sys.executable, "-m", "hflow", "run", f"recipes/{recipe}.py", f"out={out}", f"seed={seed}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, *overrides(recipe, teacher)],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    directory = out / Path(recipe).name / "latest"
    summary = json.loads((directory / "summary.json").read_text())
    curve = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    accuracies = {
        name: [[row["step"], row[name]] for row in curve if name in row]
        for name in sorted({name for row in curve for name in row if name.endswith("accuracy")})
    }
    figures = {name: summary[name] for name in ("steps", "seconds", "values")}
    return {"recipe": recipe, "seed": seed, **figures, "curves": accuracies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "recipes", nargs="*", help="measure these again; all that are missing if none is named"
    )
    args = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows = [row for row in rows if row["recipe"] not in args.recipes]
    done = {(row["recipe"], row["seed"]) for row in rows}
    wanted = [(recipe, seed) for recipe in args.recipes or RECIPES for seed in SEEDS.get(recipe, [0])]
    with tempfile.TemporaryDirectory() as out:
        teacher = ""
        for recipe, seed in wanted:
            if (recipe, seed) in done:
                continue
            if recipe in NEEDS_TEACHER and not teacher:
                run("grpo", 0, Path(out) / "teacher", "")
                teacher = str(Path(out) / "teacher" / "grpo" / "latest" / "checkpoints" / "latest" / "actor")
            rows.append(run(recipe, seed, Path(out) / f"seed-{seed}", teacher))
            args.out.write_text(json.dumps({"what": __doc__.splitlines()[0], "rows": rows}, indent=1) + "\n")
            print(recipe, seed, rows[-1]["values"], f"{rows[-1]['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
