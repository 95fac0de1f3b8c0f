"""Throughput of asynchronous runs against the limit, with a real engine and a real trainer on one core each.

    python -m benchmarks.speed.async

Runs `recipes/grpo_async.py` over Ray with random weights: the lengths of responses are geometric, with
a long tail. No schedule is faster than the longer of generation alone (a run whose trainer never fires, the
engine's slots always full) and training alone (busy seconds of the synchronous run). Both are measured twice:
on an idle machine, and with an independent process on the other core that does the other part's work
(`neighbour.py`), because cores share caches and memory.
Each run is listed with the simulator's result for the same schedule, measured seconds and lengths.
The controller and Ray also run on the two cores; the controller's share of a core is reported.

`busier_share` is the share of a step in which the busier of engine and trainer worked. It shows how close the
schedule comes to the limit under the conditions of this very run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.lib import harness, neighbour
from hflow import launch
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.run_recipe import RunEnvironment, run_compiled
from hflow.runtime.saving.run_directory import read_metrics
from hflow.runtime.simulation.simulate import simulate_run
from hflow.runtime.simulation.simulate_plan import trained_part
from hflow.workers.ray.ray_actors import RayActors

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo_async.py"
NEVER = 1_000_000
ALONE = "generation alone"
Kind = tuple[int | str, bool]
"""`max_staleness` (or `ALONE`), and `interrupt`."""
TRAINER_CORE, ENGINE_CORE = 0, 1
MEAN_TOKENS = 32
"""Mean length of a response: random weights end it with one of 32 tokens."""


def overrides(args: argparse.Namespace, kind: Kind, out: str) -> list[str]:
    staleness, interrupt = kind
    if staleness == ALONE:
        schedule = [
            "schedule.max_staleness=1",
            "schedule.sync_every=1000",
            f"nodes.actor_train.after={NEVER}",
        ]
    else:
        schedule = [f"schedule.max_staleness={staleness}"]
    return [
        f"out={out}",
        f"steps={args.steps}",
        f"batch={args.batch}",
        *schedule,
        f"schedule.interrupt={str(interrupt).lower()}",
        f"schedule.max_concurrent={args.concurrent}",
        f"models.actor.gen.max_running={args.slots}",
        f"models.actor.gen.max_model_len={args.max_tokens + 16}",
        f"models.actor.architecture.max_position_embeddings={args.max_tokens + 16}",
        f"models.actor.architecture.num_hidden_layers={args.layers}",
        f"models.actor.architecture.hidden_size={args.hidden}",
        f"models.actor.architecture.intermediate_size={4 * args.hidden}",
        f"nodes.actor_gen.max_tokens={args.max_tokens}",
        f"workload.response_mean={MEAN_TOKENS}",
        "workload.response_cv=1",
        "nodes.actor_train.prox=loglinear",
        f"nodes.actor_train.minibatches={args.minibatches}",
        f"nodes.eval_gen.after={NEVER}",
        "data.heldout.limit=1",
        "models.actor.path=null",
        "models.actor.optim.lr=0",
        "models.actor.optim.schedule=constant",
        "cores=[1]",
    ]


def measure(args: argparse.Namespace, kind: Kind, processes: RayActors) -> dict[str, Any]:
    """Return means over the steps after the first few."""
    with tempfile.TemporaryDirectory() as out:
        compiled = compile_recipe(RECIPE, overrides(args, kind, out))
        cpu, begin = time.process_time(), time.monotonic()
        summary = run_compiled(compiled, False, RunEnvironment(processes=processes, is_quiet=True))
        share = (time.process_time() - cpu) / (time.monotonic() - begin)
        rows = read_metrics(summary.directory / "metrics.jsonl")
        spans = json.loads((summary.directory / "trace.json").read_text())["traceEvents"]
        lengths = _lengths(summary.directory / "ledger.sqlite")
    steps = [row for row in rows if "time/step_seconds" in row][args.skip :]

    def mean(name: str) -> float:
        return statistics.fmean(row.get(name) or 0.0 for row in steps)

    seconds = mean("time/step_seconds")

    def busy(name: str) -> float:
        return statistics.fmean(row[name] * row["time/step_seconds"] for row in steps)

    return {
        "max_staleness": kind[0],
        "interrupt": kind[1],
        "step_seconds": seconds,
        "generation_seconds": busy("busy/engines"),
        "training_seconds": busy("busy/trainers"),
        "busier_share": max(busy("busy/engines"), busy("busy/trainers")) / seconds,
        "staleness": mean("staleness/mean"),
        "in_flight": mean("staleness/in_flight"),
        "staleness_max": max(row.get("staleness/max", 0.0) for row in steps),
        "dropped": mean("dropped/stale"),
        "tokens": mean("batch/tokens"),
        "tokens_per_second": mean("time/generated_tokens_per_second"),
        "interrupted": mean("rollout/interrupted"),
        "kept_tokens": mean("rollout/kept_tokens"),
        "weights_ms": statistics.fmean(
            [0.0, *(1e-3 * s["dur"] for s in spans if s["name"] == "weights actor@gen")][-args.steps :]
        ),
        "controller_share": share,
        "lengths": lengths,
    }


def _lengths(ledger: Path) -> list[int]:
    """Return the number of generated tokens of each sample, in the order of their ids."""
    with closing(sqlite3.connect(ledger)) as database:
        found = database.execute("SELECT tokens FROM finished WHERE stream = 0 ORDER BY sample").fetchall()
    return [tokens for (tokens,) in found]


def planned(args: argparse.Namespace, kind: Kind) -> float:
    """Return the seconds per step that the plan estimates from `configs/hardware`."""
    forecast = launch.plan(RECIPE, overrides(args, kind, "runs")).forecast
    assert forecast.period is not None
    return forecast.period.seconds


def simulated(args: argparse.Namespace, kind: Kind, alone: dict[str, float], lengths: list[int]) -> float:
    """Simulate the schedule with measured seconds and lengths; return the seconds per step."""
    plan = launch.plan(RECIPE, overrides(args, kind, "runs"))
    schedule = replace(trained_part(plan.schedule), num_steps=64)
    source = schedule.streams[0].source
    pace = alone["generation"] * args.slots / (args.batch * 8 * statistics.fmean(lengths))
    durations = {
        source: lambda sample: pace * Random(sample).choice(lengths),
        "actor_train": alone["training"],
        "actor@gen": alone["weights"],
    }
    return simulate_run(schedule, durations, slots={source: args.slots}).timeline.period()


def summarise(
    args: argparse.Namespace, kinds: list[Kind], runs: list[dict[str, Any]], beside: dict[str, float]
) -> dict[str, Any]:
    def median(kind: Kind, name: str) -> float:
        same = [run[name] for run in runs if (run["max_staleness"], run["interrupt"]) == kind]
        return float(statistics.median(same))

    alone = {
        "generation": median((ALONE, True), "step_seconds"),
        "training": median((0, True), "training_seconds"),
        "weights": median((0, True), "weights_ms") / 1e3,
    }
    limit = max(alone["generation"], alone["training"])
    lengths = next(run["lengths"] for run in runs if run["max_staleness"] == 0)
    rows = []
    for kind in kinds:
        names = [name for name in runs[0] if name not in ("max_staleness", "interrupt", "lengths")]
        row: dict[str, Any] = {"max_staleness": kind[0], "interrupt": kind[1]}
        row |= {name: median(kind, name) for name in names}
        row["share_of_limit"] = limit / row["step_seconds"]
        row["share_beside_neighbour"] = max(beside.values()) / row["step_seconds"]
        if kind[0] != ALONE:
            row["planned_seconds"] = planned(args, kind)
            row["simulated_share"] = limit / simulated(args, kind, alone, lengths)
        rows.append(row)
    return {"alone": alone, "limit": limit, "beside_neighbour": beside, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--skip", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="groups of 8")
    parser.add_argument("--slots", type=int, default=96)
    parser.add_argument("--concurrent", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2, help="interleaved")
    parser.add_argument(
        "--finish-first", type=int, nargs="*", default=[2], help="staleness of runs with interrupt=false"
    )
    parser.add_argument("--dry", action="store_true", help="write no result")
    args = parser.parse_args()
    kinds: list[Kind] = [(ALONE, True), *((eta, True) for eta in args.staleness)]
    kinds += [(eta, False) for eta in args.finish_first]
    runs = []
    beside: dict[str, list[float]] = {"generation": [], "training": []}
    with tempfile.TemporaryDirectory() as out:
        cluster = compile_recipe(RECIPE, overrides(args, (0, True), out)).plan.cluster
        processes = RayActors(cluster, is_shared=True)
    processes.start()
    try:
        for _ in range(args.rounds):
            with neighbour.busy(TRAINER_CORE, "training", args.layers, args.hidden):
                beside["generation"].append(measure(args, (ALONE, True), processes)["step_seconds"])
            with neighbour.busy(ENGINE_CORE, "generation", args.layers, args.hidden):
                beside["training"].append(measure(args, (0, True), processes)["training_seconds"])
            print(beside, flush=True)
            for kind in kinds:
                runs.append(measure(args, kind, processes))
                shown = {name: value for name, value in runs[-1].items() if name != "lengths"}
                print(json.dumps(shown), flush=True)
    finally:
        asyncio.run(processes.close())
    found = summarise(args, kinds, runs, {name: statistics.median(x) for name, x in beside.items()})
    print(json.dumps(found, indent=2))
    for run in runs:
        del run["lengths"]
    if not args.dry:
        content = {"arguments": vars(args), "load": os.getloadavg(), **found, "runs": runs}
        print(harness.write("async", content))


if __name__ == "__main__":
    main()
