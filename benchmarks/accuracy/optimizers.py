"""Held-out accuracy and loss of the shipped SFT recipe with each optimizer.

    python -m benchmarks.accuracy.optimizers benchmarks/results/DATE-optimizers.json

All start from the same random weights and train the same batches. Settings that are not in `CASES` are those
of `configs/optim/sft-tiny.yaml`, which were chosen for AdamW.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EVERY = 50
OPTIM = "models.actor.optim"
CASES: dict[str, tuple[str, ...]] = {
    "adamw": (),
    "adamw_8bit": (f"{OPTIM}.name=adamw_8bit",),
    "muon": (f"{OPTIM}.name=muon",),
    "sgd": (f"{OPTIM}.name=sgd", f"{OPTIM}.momentum=0.9", f"{OPTIM}.lr=0.1"),
}
"""Optimizer -> its settings. Muon has AdamW's learning rate, as its updates have the same size."""


def curves(name: str) -> dict[str, Any]:
    """Run `recipes/sft.py` with an optimizer, and return loss and accuracy by step."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "hflow", "run", "recipes/sft.py", "--plain", "workers=inproc"]
        command += ["cluster=cpu-1x1", f"out={out}", "save_every=100000", f"nodes.eval_gen.every={EVERY}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *CASES[name]], check=True, stdout=subprocess.DEVNULL, env=env)
        (metrics,) = Path(out).glob("*/2*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    trained = [row for row in rows if "sft_train/loss" in row]
    return {
        "settings": list(CASES[name]),
        "loss": [(row["step"], row["sft_train/loss"]) for row in trained[EVERY - 1 :: EVERY]],
        "accuracy": [(row["step"], row["eval_gen/accuracy"]) for row in rows if "eval_gen/accuracy" in row],
    }


def main(path: Path) -> None:
    """Run each optimizer that the file lacks, and write the file after each."""
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in CASES:
        if name not in results:
            results[name] = curves(name)
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(name, results[name])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
