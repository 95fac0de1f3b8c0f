"""How files and commands grow with a run: 96 samples a step, through the real ledger, metrics and texts.

    python -m benchmarks.speed.growth --steps 100000

There is no model: the reports of a controller are written as fast as the files take them.
It gives the processor time, bytes and memory of a step in the first and in the last tenth of the steps, then
the size of each file, the time of what reads them, and of going back to the middle.
"""

from __future__ import annotations

import argparse
import io
import random
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.lib import harness
from benchmarks.speed.ledger import GROUP, HEADER, Lives
from hflow import launch
from hflow.launch.results.runs import read_report
from hflow.launch.running.shown_metrics import builtin_metrics
from hflow.report.html.run import render_run_page
from hflow.report.text.results import render_run_report
from hflow.runtime.ledger import Ledger
from hflow.runtime.ledger.ledger import rewind
from hflow.runtime.records.metric_columns import drop_rows_after
from hflow.runtime.records.metrics_log import MetricsLog
from hflow.runtime.records.sample_text_files import drop_samples_after, write_samples
from hflow.runtime.saving.run_directory import RunDirectory

GROUPS = 12
"""Groups of a step."""
RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.py"
TEXTS = 8
"""Texts that are kept of a step, the default of `report.samples`."""
METRICS = 60
"""Metrics of a step."""


def tell(directory: RunDirectory, num_steps: int) -> dict[str, Any]:
    """Write the reports of steps; return the cost of one in the first and in the last tenth of them."""
    draw = random.Random(0)
    tenths: list[dict[str, float]] = []
    middle = 0
    with (
        Ledger(directory.ledger, HEADER) as ledger,
        closing(MetricsLog(directory.metrics, directory.tensorboard, builtin_metrics())) as log,
    ):
        lives = Lives(ledger, GROUPS)
        for tenth in range(10):
            cpu, size = time.process_time(), _bytes(directory.path)
            steps = range(1 + tenth * num_steps // 10, 1 + (tenth + 1) * num_steps // 10)
            for step in steps:
                for _ in range(GROUPS):
                    lives.tell()
                log.write(step, _values(draw))
                write_samples(directory.samples, step, _texts(step))
            position = ledger.position()
            if tenth == 4:
                middle = position
            tenths.append(
                {
                    "cpu_ms_per_step": 1e3 * (time.process_time() - cpu) / len(steps),
                    "bytes_per_step": (_bytes(directory.path) - size) / len(steps),
                    "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
                }
            )
        ledger.close("done")
    return {"first_tenth": tenths[0], "last_tenth": tenths[-1], "middle": middle}


def _values(draw: random.Random) -> dict[str, float]:
    names = ("time/step_seconds", "gen/reward", "actor_train/loss", "actor_train/entropy")
    others = (f"actor_train/metric_{number}" for number in range(METRICS - len(names)))
    return {name: draw.random() for name in (*names, *others)}


def _texts(step: int) -> list[dict[str, Any]]:
    first = (step - 1) * GROUPS * GROUP
    turns = [
        {"role": "user", "text": "12 + 34 = ", "trained": False},
        {"role": "assistant", "text": f"The sum is {step}. " * 20, "trained": True},
    ]
    return [
        {
            "root": "gen",
            "stream": "gen",
            "id": first + sample,
            "group": (first + sample) // GROUP,
            "step": step,
            "turns": turns,
            "values": {"reward": 1.0},
        }
        for sample in range(TEXTS)
    ]


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def query(directory: RunDirectory, num_steps: int, position: int) -> dict[str, float]:
    """Return the seconds of processor time of what commands read and print, and of going back to the middle.

    Args:
        directory: the run's.
        num_steps: number of steps that were written.
        position: the ledger's after half of them.
    """
    run, middle = str(directory.path), num_steps * GROUPS * GROUP // 2
    asked: dict[str, Callable[[], Any]] = {
        "report": lambda: _print(render_run_report(read_report(run))),
        "report --html": lambda: render_run_page(read_report(run)),
        "watch": lambda: render_run_page(read_report(run, is_live=True)),
        "why": lambda: launch.why_texts(run, launch.why(run, str(middle))),
        "samples": lambda: launch.samples(run, None, 20),
        "samples --where, which many meet": lambda: launch.samples(run, "tokens > 100", 20),
        "samples --where, which none meet": lambda: launch.samples(run, "reward < 0", 20),
        "samples --text": lambda: launch.samples_with_text(run, None, 20),
        "going back": lambda: _go_back(directory, num_steps // 2, position),
        "report after going back": lambda: _print(render_run_report(read_report(run))),
    }
    found = {}
    for name, ask in asked.items():
        start = time.process_time()
        ask()
        found[name] = time.process_time() - start
        print(f"{name}: {found[name]:.2f} s", flush=True)
    return found


def _go_back(directory: RunDirectory, step: int, position: int) -> None:
    rewind(directory.ledger, step, position)
    drop_samples_after(directory.samples, step)
    drop_rows_after(directory.metrics, step)


def _print(text: Any) -> None:
    Console(file=io.StringIO()).print(text)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        compiled = launch.compile_recipe(RECIPE, [f"steps={args.steps}"])
        directory = RunDirectory.create(out, "grpo", "", launch.plan_file_text(compiled))
        told = tell(directory, args.steps)
        files = {
            "ledger.sqlite": directory.ledger.stat().st_size,
            "metrics.jsonl": directory.metrics.stat().st_size,
            "tensorboard": _bytes(directory.tensorboard),
            "samples": _bytes(directory.samples),
        }
        result = {
            **told,
            "samples": args.steps * GROUPS * GROUP,
            "bytes": files,
            "files_of_samples": sum(1 for _ in directory.samples.iterdir()),
            "seconds": query(directory, args.steps, told["middle"]),
        }
    harness.write("growth", {"arguments": harness.numbers(args), **result})


if __name__ == "__main__":
    main()
