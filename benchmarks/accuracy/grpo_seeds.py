"""Three seeds of the demo: supervised steps, then GRPO or another recipe; accuracy curves and times.

python -m benchmarks.accuracy.grpo_seeds
python -m benchmarks.accuracy.grpo_seeds --recipe ppo
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib import harness

ROOT = Path(__file__).parents[2]


def run(recipe: str, out: str, *overrides: str) -> tuple[Path, float]:
    """One run of a recipe; its directory and its whole time, start of Ray included."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "hflow", "run", f"recipes/{recipe}.py", f"out={out}", *overrides]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return (Path(out) / recipe / "latest").resolve(), time.perf_counter() - start


def curve(directory: Path) -> list[tuple[int, float]]:
    """(step, held-out accuracy)."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["eval_gen/accuracy"]) for row in rows if "eval_gen/accuracy" in row]


def measure(recipe: str, seed: int, *overrides: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        sft, sft_seconds = run("sft", out, f"seed={seed}", *overrides)
        actor = f"models.actor.path={sft / 'checkpoints' / 'latest' / 'actor'}"
        learned, seconds = run(recipe, out, f"seed={seed}", actor, *overrides)
        return {
            "seed": seed,
            "sft_seconds": sft_seconds,
            f"{recipe}_seconds": seconds,
            "sft_accuracy": curve(sft),
            f"{recipe}_accuracy": curve(learned),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="grpo", help="what follows the supervised steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    rows = [measure(args.recipe, seed, *args.overrides) for seed in args.seeds]
    summary = [
        {
            "seed": row["seed"],
            "start": row[f"{args.recipe}_accuracy"][0][1],
            "end": row[f"{args.recipe}_accuracy"][-1][1],
            "minutes": round((row["sft_seconds"] + row[f"{args.recipe}_seconds"]) / 60, 2),
        }
        for row in rows
    ]
    config = {"seeds": args.seeds, "overrides": args.overrides}
    path = harness.write(f"{args.recipe}-seeds", {"summary": summary, "config": config, "rows": rows})
    print(json.dumps(summary, indent=2), path, sep="\n")


if __name__ == "__main__":
    main()
