"""Accuracy by staleness and loss: GRPO on samples that are as stale as the schedule allows.

    python -m benchmarks.accuracy.staleness_ablation run.jsonl --workers 2   # hours; run it again to continue
    python -m benchmarks.accuracy.staleness_ablation run.jsonl --tasks addition --staleness 0 1 2 8
    python -m benchmarks.accuracy.staleness_ablation run.jsonl --summarize   # the table and the picture

Each finished run is a line of `run.jsonl`, and a run that has its line is not done again, so a sweep that is
killed continues. A run is one process with one thread.

Each method gets the learning rate with the best mean accuracy over the staleness values and seeds of
`TUNING`, which the sweep does not use. All runs of a task start from one supervised checkpoint, which is half
right: of additions the one that comes with hflow, of multiplications one that the sweep makes first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy import multiplication
from benchmarks.lib import harness

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "benchmarks" / "accuracy" / "recipes"
SECONDS_AHEAD = {"addition": 0.5, "multiplication": 2.0}
"""Head start of the engine, for each batch that the schedule lets it run ahead."""


@dataclass(frozen=True)
class Method:
    """A recipe and its overrides."""

    recipe: str
    overrides: tuple[str, ...]


METHODS = {
    "naive": Method("stale_grpo", ("nodes.actor_train.prox=none",)),
    "decoupled": Method("stale_grpo", ("nodes.actor_train.prox=recompute",)),
    "mis": Method("stale_mis", ()),
    # What makes naive and decoupled differ: the width of the trust region, or the cap of the weights.
    "naive-unclipped": Method("stale_grpo", ("nodes.actor_train.prox=none", "nodes.actor_train.clip=1e9")),
    "decoupled-tight": Method(
        "stale_grpo", ("nodes.actor_train.prox=recompute", "nodes.actor_train.clip=0.05")
    ),
    "decoupled-uncapped": Method(
        "stale_grpo", ("nodes.actor_train.prox=recompute", "nodes.actor_train.behav_weight_cap=null")
    ),
}
"""Naive: PPO's clipping around stale log-probs of the weights that generated the tokens. Decoupled clips
around the step's weights and weighs by prox / behav. MIS: decoupled, with the weights and masks of
`recipes/mis.py`."""
MAIN_METHODS = ("naive", "decoupled", "mis")


@dataclass(frozen=True)
class Tuning:
    """How the learning rate of a method is chosen."""

    rates: Mapping[str, tuple[float, ...]]
    """Of each task."""
    staleness: tuple[int, ...] = (1, 8)
    seeds: tuple[int, ...] = (100, 101)


TUNING = Tuning({"addition": (5e-5, 1e-4, 2e-4, 4e-4), "multiplication": (5e-5, 1e-4, 2e-4, 4e-4)})
T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Degrees of freedom -> 97.5 % quantile of Student's t."""


@dataclass(frozen=True)
class Cell:
    """One run of the sweep."""

    task: str
    method: str
    staleness: int
    seed: int
    lr: float
    steps: int


class Sweep:
    """Runs cells that have no line in the file of finished runs yet."""

    def __init__(self, path: Path, workers: int) -> None:
        self._path = path
        self._pool = ThreadPoolExecutor(workers)
        self._lock = threading.Lock()
        self._work = path.with_suffix("")  # starts and the runs in progress
        self.runs = read_runs(path)

    def run(self, cells: Sequence[Cell]) -> None:
        """Run all cells that are not finished, a few at once."""
        missing = [cell for cell in cells if cell not in self.runs]
        starts = {task: self._start(task) for task in {cell.task for cell in missing}}
        list(self._pool.map(lambda cell: self._measure(cell, starts[cell.task]), missing))

    def _data(self, task: str, kind: str) -> list[str]:
        """Return the overrides that make a recipe learn a task; `kind` is `sft` or `rl`."""
        if task == "addition":
            return []
        directory = self._work / "multiplication"
        prefix = "sft" if kind == "sft" else ""
        files = {"train": prefix or "train", "heldout": "-".join(filter(None, (prefix, "heldout")))}
        tokens = ["eval_gen"] if kind == "sft" else ["actor_gen", "eval_gen"]
        return [
            f"models.actor.alphabet='{multiplication.ALPHABET}'",
            "data.heldout.split=train",
            *(f"data.{data}.generator=null" for data in files),
            *(f"data.{data}.path={directory / name}.jsonl" for data, name in files.items()),
            *(f"nodes.{node}.max_tokens={multiplication.MAX_TOKENS}" for node in tokens),
        ]

    def _start(self, task: str) -> str:
        """Return the checkpoint that all runs of a task start from. Multiplications are learned here."""
        if task == "addition":
            return "hflow:addition"
        out = self._work / "start"
        if not (out / "sft" / "latest" / "summary.json").exists():
            multiplication.write(self._work / "multiplication")
            length = ("steps=260", "batch=64", "nodes.eval_gen.every=130", "cluster=cpu-1x1")
            hflow_run(ROOT / "recipes" / "sft.py", out, *length, *self._data(task, "sft"))
        return str(out / "sft" / "latest" / "checkpoints" / "latest" / "actor")

    def _measure(self, cell: Cell, start: str) -> None:
        method = METHODS[cell.method]
        rows = hflow_run(
            RECIPES / f"{method.recipe}.py",
            self._work / "-".join(str(value) for value in asdict(cell).values()),
            f"seed={cell.seed}",
            f"steps={cell.steps}",
            f"models.actor.path={start}",
            f"models.actor.optim.lr={cell.lr}",
            f"schedule.max_staleness={cell.staleness}",
            f"nodes.slow_advantage.first={SECONDS_AHEAD[cell.task] * cell.staleness}",
            "save_every=100000",
            *method.overrides,
            *self._data(cell.task, "rl"),
        )
        line = {"cell": asdict(cell), **summary_of(rows, cell)}
        with self._lock:
            harness.append_line(self._path, line)
            self.runs[cell] = line
        print({**asdict(cell), "accuracy": line["accuracy"]}, flush=True)


def read_runs(path: Path) -> dict[Cell, dict[str, Any]]:
    """Return the finished runs of a sweep by their cells."""
    return {Cell(**line["cell"]): line for line in harness.read_lines(path)}


def hflow_run(recipe: Path, out: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run a recipe in one process with one thread; return the rows of its metrics."""
    command = [sys.executable, "-m", "hflow", "run", str(recipe), f"out={out}", "workers=inproc", *overrides]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    metrics = out / recipe.stem / "latest" / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def summary_of(rows: list[dict[str, Any]], cell: Cell) -> dict[str, Any]:
    """Return a run's curve of accuracy, its lag, and the means of the train node's metrics."""
    trained = [row for row in rows if "staleness/mean" in row]
    full = trained[cell.staleness + 1 :]  # the first batches are younger: there are no older weights yet
    curve = [(row["step"], row["eval_gen/accuracy"]) for row in rows if "eval_gen/accuracy" in row]
    names = [
        name for name in trained[-1] if name.startswith(("actor_train/", "behav_weights/", "is_trusted/"))
    ]
    return {
        "accuracy": curve[-1][1],
        "mean": statistics.fmean(accuracy for _, accuracy in curve),
        "lag": statistics.fmean(row["staleness/mean"] for row in full),
        "curve": curve,
        "metrics": {name: statistics.fmean(row[name] for row in full if name in row) for name in names},
    }


def best_rates(
    runs: dict[Cell, dict[str, Any]], task: str, methods: Sequence[str], steps: int
) -> dict[str, float]:
    """Return the learning rate of each method with the best mean accuracy at the end, on the tuning seeds."""
    return {
        method: max(
            TUNING.rates[task],
            key=lambda rate: statistics.fmean(
                runs[cell]["accuracy"] for cell in tuning_cells(task, method, steps, rate)
            ),
        )
        for method in methods
    }


def tuning_cells(task: str, method: str, steps: int, rate: float) -> list[Cell]:
    pairs = itertools.product(TUNING.staleness, TUNING.seeds)
    return [Cell(task, method, staleness, seed, rate, steps) for staleness, seed in pairs]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % confidence interval, by Student's t."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def summarize(runs: dict[Cell, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and confidence interval over seeds of each task, method and staleness.

    Runs with other learning rates than the best of a method are left out. `minus_naive` compares runs of the
    same seed, with the interval of their differences.
    """
    done = {cell: line for cell, line in runs.items() if cell.seed not in TUNING.seeds}
    kinds = {(cell.task, cell.method, cell.steps) for cell in done}
    best = {(task, method): best_rates(runs, task, [method], steps)[method] for task, method, steps in kinds}
    main = {cell: line for cell, line in done.items() if cell.lr == best[cell.task, cell.method]}
    table = []
    for task, method, staleness in sorted({(cell.task, cell.method, cell.staleness) for cell in main}):
        same = {
            c.seed: line
            for c, line in main.items()
            if (c.task, c.method, c.staleness) == (task, method, staleness)
        }
        naive = {
            c.seed: line
            for c, line in main.items()
            if (c.task, c.method, c.staleness) == (task, "naive", staleness)
        }
        row = {"task": task, "method": method, "staleness": staleness, "seeds": sorted(same)}
        row["lr"] = best[task, method]
        row["lag"] = statistics.fmean(line["lag"] for line in same.values())
        for figure in ("accuracy", "mean"):
            row[figure], row[f"{figure}_ci"] = interval([line[figure] for line in same.values()])
            gaps = [line[figure] - naive[seed][figure] for seed, line in same.items() if seed in naive]
            if gaps and method != "naive":
                row[f"{figure}_minus_naive"], row[f"{figure}_minus_naive_ci"] = interval(gaps)
        table.append(row)
    return table


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Draw accuracies at the end with 95 % confidence intervals: a panel for a task, a line for a method."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    tasks = sorted({row["task"] for row in table})
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(5.5 * len(tasks), 3.6), layout="constrained", squeeze=False
    )
    for axes, task in zip(panels[0], tasks, strict=True):
        for shift, method in enumerate(MAIN_METHODS):
            rows = [row for row in table if (row["task"], row["method"]) == (task, method)]
            at = [row["staleness"] * (1 + 0.04 * shift) + 0.04 * shift for row in rows]
            means, widths = [row["accuracy"] for row in rows], [row["accuracy_ci"] for row in rows]
            axes.errorbar(at, means, widths, marker="o", capsize=3, label=method)
        axes.set_xscale("symlog", base=2, linthresh=1)
        ticks = sorted({row["staleness"] for row in table if row["task"] == task})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set(title=task, xlabel="max_staleness", ylabel="held-out accuracy at the end", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path, help="JSONL of finished runs, which the sweep continues")
    parser.add_argument("--tasks", nargs="+", default=["addition", "multiplication"])
    parser.add_argument("--methods", nargs="+", default=MAIN_METHODS, choices=METHODS)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, help="learning rate of all methods; default: choose it for each")
    parser.add_argument(
        "--workers", type=int, default=1, help="runs at once; each is a process with one thread"
    )
    parser.add_argument("--summarize", action="store_true", help="write the result of the finished runs only")
    args = parser.parse_args()
    args.runs = args.runs.resolve()
    if args.summarize:
        runs = read_runs(args.runs)
        table = summarize(runs)
        content = {"tuning": asdict(TUNING), "summary": table, "runs": list(runs.values())}
        path = harness.write("staleness-ablation", content)
        draw(table, path.with_suffix(".svg"))
        print(json.dumps(table, indent=2), path, sep="\n")
        return
    sweep = Sweep(args.runs, args.workers)
    for task in args.tasks:
        rates = dict.fromkeys(args.methods, args.lr)
        if args.lr is None:
            tuned = itertools.product(args.methods, TUNING.rates[task])
            sweep.run([c for method, rate in tuned for c in tuning_cells(task, method, args.steps, rate)])
            rates = best_rates(sweep.runs, task, args.methods, args.steps)
            print({"task": task, "learning rates": rates}, flush=True)
        cells = itertools.product(args.staleness, args.seeds, args.methods)
        sweep.run([Cell(task, method, eta, seed, rates[method], args.steps) for eta, seed, method in cells])


if __name__ == "__main__":
    main()
