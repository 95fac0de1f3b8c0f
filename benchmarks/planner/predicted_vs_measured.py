"""The plan's seconds beside those of runs on this machine, with figures that `hflow profile` measured here.

    hflow profile --out here.yaml
    python -m benchmarks.planner.predicted_vs_measured --calibration here.yaml [--only TEXT]

Models have random weights, answers have a fixed length, and nothing is evaluated. The measured step is the
median of `time/step_seconds` after two steps; that of a node, the median of its slowest rank in the trace.
`learned` is the prediction by `calibrate=RUN`, where RUN is GRPO with the same model and as many processes;
it is left out for that run itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.lib import harness
from hflow import launch
from hflow.launch.planning.compile import compile_recipe
from hflow.profiling.run_times import STEP, WARM_STEPS, read_run_times
from hflow.runtime.saving.run_directory import RunDirectory

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = ["steps=14"]
"""The shipped demo: 0.5 million parameters, 512 answers of 4 tokens."""
LARGER = [
    *(f"models.actor.architecture.{key}" for key in ("hidden_size=512", "intermediate_size=1536")),
    *(f"models.actor.architecture.{key}" for key in ("num_hidden_layers=6", "num_attention_heads=8")),
    *(f"models.actor.architecture.{key}" for key in ("num_key_value_heads=4", "vocab_size=1024")),
    *("nodes.actor_gen.max_tokens=32", "workload.response_mean=32", "steps=8"),
]
"""19 million parameters, 48 answers of 32 tokens (PPO: 16)."""
GRPO, PPO = "batch=6", "batch=16"
IN_PROCESS = ["workers=inproc", "cluster=cpu-1x1"]
MEGATRON = ["models.actor.backend=megatron"]
CASES: dict[str, tuple[str, list[str]]] = {
    "grpo 19M, one process": ("grpo", [*LARGER, GRPO, *IN_PROCESS]),
    "ppo 19M, one process": ("ppo", [*LARGER, PPO, *IN_PROCESS]),
    "grpo 19M, d2": ("grpo", [*LARGER, GRPO]),
    "grpo 19M, t2": ("grpo", [*LARGER, GRPO, *MEGATRON, "placement=actor=all:t2 actor.gen=all:d2"]),
    "grpo 19M, p2": ("grpo", [*LARGER, GRPO, *MEGATRON, "placement=actor=all:p2 actor.gen=all:d2"]),
    "ppo 19M, d2": ("ppo", [*LARGER, PPO]),
    "grpo_async 19M, 1 + 1": ("grpo_async", [*LARGER, GRPO]),
    "grpo tiny, one process": ("grpo", [*TINY, *IN_PROCESS]),
    "ppo tiny, one process": ("ppo", [*TINY, "batch=128", *IN_PROCESS]),
    "grpo tiny, d2": ("grpo", TINY),
    "ppo tiny, d2": ("ppo", [*TINY, "batch=128"]),
    "grpo_async tiny, 1 + 1": ("grpo_async", TINY),
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""A device is one core."""


@dataclass
class Result:
    """Predicted and measured seconds of a step, and of its nodes."""

    predicted: float
    measured: float
    steps: list[float]
    load: tuple[float, float]
    """Processes that ran or waited, over a minute, before and after."""
    nodes: dict[str, tuple[float, float]]
    """Node -> predicted and measured."""
    learned: float | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1

    @property
    def learned_error(self) -> float | None:
        """The same of what was learned from another run."""
        return None if self.learned is None else self.learned / self.measured - 1


def settings(case: str, figures: str) -> list[str]:
    """Return the configuration of a case."""
    recipe, changes = CASES[case]
    common = ["models.actor.path=null", "nodes.eval_gen.after=100000", "save_every=100000"]
    first = ["nodes.actor_train.after=0"] if recipe == "ppo" else []
    return [*common, *first, "workload.response_cv=0", figures, *changes]


def step_seconds(case: str, figures: str) -> float:
    """Return the predicted seconds of a step."""
    forecast = launch.plan(RECIPES / f"{CASES[case][0]}.py", settings(case, figures)).forecast
    assert forecast.period is not None
    return forecast.period.seconds


def measure(case: str, calibration: str, out: Path) -> Result:
    """Plan a case and run it in `out`."""
    recipe, values = RECIPES / f"{CASES[case][0]}.py", settings(case, f"calibration={calibration}")
    plan = compile_recipe(recipe, values).plan
    before = os.getloadavg()[0]
    command = [sys.executable, "-m", "hflow", "run", str(recipe), "--plain", *values]
    command += [f"out={out}", f"name={slug(case)}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **ENVIRONMENT})
    times = read_run_times(RunDirectory(out / slug(case) / "latest"), plan).seconds
    predicted = {row.node: row.seconds for row in plan.forecast.times}
    nodes = {name: (predicted.get(name, 0.0), statistics.median(row)) for name, row in times.items() if row}
    steps = list(times[STEP])
    load = (round(before, 1), round(os.getloadavg()[0], 1))
    del nodes[STEP]
    return Result(
        step_seconds(case, f"calibration={calibration}"), statistics.median(steps), steps, load, nodes
    )


def slug(case: str) -> str:
    """Return a case's name as that of a directory."""
    return case.replace(",", "").replace(" ", "-").replace("+", "and")


def teacher(case: str) -> str:
    """Return the run that a case learns from."""
    model = case.split()[1].rstrip(",")
    return f"grpo {model}, one process" if "one process" in case else f"grpo {model}, d2"


def report(case: str, result: Result) -> None:
    """Print a case and its nodes."""
    learned = "" if result.learned_error is None else f"{result.learned_error:+9.0%}"
    seconds = f"{result.predicted * 1e3:8.0f} ms {result.measured * 1e3:8.0f} ms {result.error:+7.0%}"
    print(f"{case:26}{seconds}{learned}   load {result.load[0]} to {result.load[1]}", flush=True)
    for name, (predicted, measured) in result.nodes.items():
        print(f"    {name:22}{predicted * 1e3:8.0f} ms {measured * 1e3:8.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", required=True, help="file of hflow profile")
    parser.add_argument("--only", default="", help="cases with this text")
    args = parser.parse_args()
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        for case in CASES:
            if args.only in case:
                results[case] = measure(case, args.calibration, out)
                run = out / slug(teacher(case)) / "latest"
                if teacher(case) != case and run.exists():
                    results[case].learned = step_seconds(case, f"calibrate={run}")
                report(case, results[case])
    rows = {
        case: {**asdict(r), "error": r.error, "learned_error": r.learned_error} for case, r in results.items()
    }
    content = {"what": f"step seconds after {WARM_STEPS} steps, by hflow profile", "rows": rows}
    if not args.only:
        print(harness.write("predicted-vs-measured", content))


if __name__ == "__main__":
    main()
