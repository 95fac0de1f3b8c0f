"""Ends and stops random processes of runs, continues the runs, and checks that nothing is lost.

    python tests/fault/chaos.py --faults 20 --out results.json

Each run on Ray takes several faults at random moments, with a checkpoint after every step: processes are
killed (SIGKILL), paused (SIGSTOP, and SIGCONT later) or stopped for good, or asked to end (SIGTERM, Ctrl-C),
while the run starts, trains, saves or restarts. A run that ends is resumed until it is done. Then:

- the ledger is consistent: each sample has exactly one end, and none was trained twice or too old;
- as many samples were trained as the run has steps for, and `metrics.jsonl` has every step;
- metrics and weights of a synchronous run, with deterministic=true, equal those of the same run without a
  fault, bit for bit;
- no process of the run is left, and no file in shared memory or half a checkpoint;
- `faults.max_restarts` counted the restarts since the last checkpoint.

Results are appended to those in the file, each with the version of hflow that ran, and seeds continue after
theirs. So many short sweeps add up to a long one.

`inproc_chaos.py` does the same with runs in one process, whose whole process is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from disturbed_run import ROOT, DisturbedRun, Fault, Recipe, Result, run_undisturbed
from run_processes import adopt_orphans

STEPS, BATCH = 30, 8
OF_TWO_WORKERS = [f"steps={STEPS}", f"batch={BATCH}", "cluster=cpu-1x2"]
FAULTS_PER_RUN = 8
DETERMINISTIC = "deterministic=true"
COMMON = [
    *("models.actor.path=null", "save_every=1", "save_minutes=0"),
    *("models.actor.optim.lr=1e-3", "collective_timeout=30.0", "--plain"),
    "faults.hang_seconds=15.0",
]
TINY = [
    *("+model@models.actor=tiny-qwen2", "+data@data.train=addition", "+data@data.heldout=addition"),
    *("nodes.actor_gen.max_tokens=4", "nodes.eval_gen.max_tokens=4", "data.heldout.limit=6"),
    "models.critic.optim.lr=1e-3",
]
"""What the configurations of shipped recipes have."""
SMALL_STEPS = 12
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "small_ppo",
            [
                *("tests/integration/recipes/resumed.py", *COMMON, DETERMINISTIC, *TINY),
                *("cluster=cpu-1x1", "batch=4", f"steps={SMALL_STEPS}"),
            ],
            SMALL_STEPS,
            SMALL_STEPS * 4,
            models=("actor", "critic"),
            is_synchronous=True,
        ),
        Recipe(
            "ppo",
            ["tests/integration/recipes/resumed.py", *COMMON, DETERMINISTIC, *TINY, *OF_TWO_WORKERS],
            STEPS,
            STEPS * BATCH,
            models=("actor", "critic"),
            is_synchronous=True,
        ),
        Recipe(
            "grpo",
            [
                "recipes/grpo.py",
                *COMMON,
                DETERMINISTIC,
                *OF_TWO_WORKERS,
                "nodes.eval_gen.every=10",
                "data.heldout.limit=6",
            ],
            STEPS,
            STEPS * BATCH * 8,
            is_synchronous=True,
        ),
        Recipe(
            "grpo_async",
            ["recipes/grpo_async.py", *COMMON, *OF_TWO_WORKERS, "nodes.eval_gen.after=1000"],
            STEPS,
            STEPS * BATCH * 8,
        ),
        Recipe(
            "tool_agent",
            ["recipes/tool_agent.py", *COMMON, *OF_TWO_WORKERS, "nodes.eval_agent.after=1000"],
            STEPS,
            STEPS * BATCH * 8,
            exactly=False,
        ),
    )
}
FAULTS = {
    ("worker", "kill"): 4,
    ("worker", "pause"): 1,
    ("worker", "hang"): 2,
    ("reward", "kill"): 3,
    ("reward", "hang"): 1,
    ("raylet", "kill"): 2,
    ("raylet", "pause"): 1,
    ("gcs", "kill"): 2,
    ("gcs", "pause"): 1,
    ("agent", "kill"): 1,
    ("controller", "kill"): 3,
    ("controller", "pause"): 1,
    ("controller", "term"): 2,
    ("controller", "int"): 2,
}
"""Role and action -> how often they are chosen, relative to each other."""
MOMENTS = {"step": 6, "save": 3, "soon": 2}
"""Moment -> how often it is chosen."""
LONGEST_DELAY = {"step": 0.6, "save": 0.1, "soon": 12.0}
"""Moment -> most seconds after it."""


def main() -> None:
    """Run until enough faults were done, and print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, help="of the first run; default: the one after those in --out")
    parser.add_argument("--recipe", choices=RECIPES, action="append")
    parser.add_argument("--fault", metavar="ROLE-ACTION-MOMENT[-SECONDS]", action="append")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # runs of a program in the background ignore it
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        os.environ["RAY_TMPDIR"] = name  # Ray keeps the logs of every start
        # Ray waits a minute by default before it replaces a process that ends while it starts.
        os.environ.setdefault("RAY_worker_register_timeout_seconds", "20")
        chosen = [read_fault(fault) for fault in arguments.fault or ()]
        names = arguments.recipe or sorted(set(RECIPES) - {"small_ppo"})
        num_faults = len(chosen) or arguments.faults
        undisturbed: dict[str, Path] = {}
        earlier = read(arguments.out)
        version()  # of now, whatever is committed while runs are tried
        results: list[Result] = []
        seed = next_seed(earlier) if arguments.seed is None else arguments.seed
        while (missing := num_faults - sum(len(result.strikes) for result in results)) > 0:
            recipe = RECIPES[names[seed % len(names)]]
            if recipe.is_synchronous and recipe.name not in undisturbed:
                undisturbed[recipe.name] = run_undisturbed(recipe, directory / f"undisturbed-{recipe.name}")
            faults = chosen or choose_faults(Random(seed), min(FAULTS_PER_RUN, missing))

            def report(result: Result) -> None:
                write(arguments.out, earlier, [*results, result])

            run = DisturbedRun(
                recipe, seed, faults, directory / str(seed), undisturbed.get(recipe.name), report
            )
            results.append(run.run())
            print(json.dumps(results[-1].to_json()), flush=True)
            write(arguments.out, earlier, results)
            seed += 1
    print(f"\n{table(results)}")
    sys.exit(any(result.problems for result in results))


def read_fault(text: str) -> Fault:
    """Return the fault that an option names, such as `worker-kill-step` or `controller-term-soon-5.0`."""
    role, action, moment, *delay = text.split("-")
    return Fault(role, action, moment, *map(float, delay))


def choose_faults(random: Random, number: int) -> list[Fault]:
    """Return random faults."""
    kinds = random.choices(list(FAULTS), weights=list(FAULTS.values()), k=number)
    moments = random.choices(list(MOMENTS), weights=list(MOMENTS.values()), k=number)
    return [
        Fault(role, action, moment, random.uniform(0, LONGEST_DELAY[moment]))
        for (role, action), moment in zip(kinds, moments, strict=True)
    ]


def read(path: Path | None) -> list[dict[str, Any]]:
    """Return the results of earlier sweeps."""
    if path is None or not path.is_file():
        return []
    earlier: list[dict[str, Any]] = json.loads(path.read_text())
    return earlier


def next_seed(earlier: list[dict[str, Any]]) -> int:
    """Return the seed after those of earlier sweeps."""
    return 1 + max((result["seed"] for result in earlier), default=-1)


@cache
def version() -> str:
    """Return the commit that is tried, with `+` if files have changed since."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def write(path: Path | None, earlier: list[dict[str, Any]], results: list[Result]) -> None:
    """Write the results of all sweeps to a file, if there is one."""
    if path is not None:
        found = [{"version": version(), **result.to_json()} for result in results]
        path.write_text(json.dumps([*earlier, *found], indent=1) + "\n")


def table(results: list[Result]) -> str:
    """Return how the faults were survived, by fault, and the problems of the runs."""
    rows = [
        "| fault | number | survived by | seconds to the next step, median | most |",
        "|-|-:|-|-:|-:|",
    ]
    strikes = [strike for result in results for strike in result.strikes]
    for fault in sorted({strike.fault for strike in strikes}):
        same = [strike for strike in strikes if strike.fault == fault]
        ways = Counter(strike.survived_by for strike in same).most_common()
        seconds = [strike.seconds for strike in same if strike.seconds is not None]
        times = f"{statistics.median(seconds):.1f} | {max(seconds):.1f}" if seconds else "|"
        rows.append(f"| {fault} | {len(same)} | {_counted(ways)} | {times} |")
    rows += ["", "| run | runs | faults | restarts | replaced | resumed | problems |"]
    rows += ["|-|-:|-:|-:|-:|-:|-:|"]
    for name in sorted({result.run for result in results}):
        runs = [result for result in results if result.run == name]
        numbers = (
            len(runs),
            sum(len(result.strikes) for result in runs),
            sum(result.restarts for result in runs),
            sum(result.replacements for result in runs),
            sum(len(result.exit_codes) - 1 for result in runs),
            sum(len(result.problems) for result in runs),
        )
        rows.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    return "\n".join(rows)


def _counted(ways: list[tuple[str, int]]) -> str:
    return ", ".join(f"{way} {number}" for way, number in ways)


if __name__ == "__main__":
    main()
