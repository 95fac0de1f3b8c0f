"""The controller with 128 virtual workers: throughput beside the limit, CPU, agreement with the simulator.

    python -m benchmarks.speed.async_virtual

`recipes/grpo_async.py` planned for 128 H100s, of which 32 train Qwen2.5-0.5B, with the real executor, state
machine, ledger and metrics over workers that take the plan's seconds and do nothing else. Lengths have a long
tail. Each run is compared with `hflow simulate`, and with a simulation of exactly the same draws.

On the clock of these runs pass the CPU seconds of the controller (with the ledger's thread, and without the
work of the virtual workers themselves), and waits at once. So they show what the controller costs, whatever
else the machine does; `--real` runs by the wall clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.lib import harness
from benchmarks.lib.virtual_workers import ControllerTime, Traffic, VirtualWorkers
from hflow import launch
from hflow.base.garbage import freeze_gc
from hflow.data.rows.row_order import RowOrder
from hflow.planner.plan.rows import Plan
from hflow.runtime.events import Refusal
from hflow.runtime.execution.executor import Executor
from hflow.runtime.execution.run_context import RunContext
from hflow.runtime.ledger import Ledger, audit, make_header
from hflow.runtime.records.activity import OngoingWork
from hflow.runtime.records.metrics_log import MetricsLog
from hflow.runtime.records.trace import Trace
from hflow.runtime.saving.checkpoint import Checkpoints
from hflow.runtime.saving.run_directory import RunDirectory
from hflow.runtime.simulation.simulate import DurationFunction, Durations, response_seconds, simulate_run
from hflow.runtime.simulation.simulate_plan import Simulation, simulate_plan, trained_part
from hflow.workers.interface import BodyRetry, Span

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo_async.py"
SEED = 0
REWARD_SECONDS = 0.02
"""Mean of a reward's exponential delay."""
PROBE_SECONDS = 0.001


@dataclass
class Probe:
    """How late the event loop comes to what is due."""

    clock: Callable[[], float]
    lateness: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        """Ask for the loop again and again."""
        while True:
            due = self.clock() + PROBE_SECONDS
            await asyncio.sleep(PROBE_SECONDS)
            self.lateness.append(max(0.0, self.clock() - due))


@dataclass
class Rows:
    """The observer: files as those of a run, and when steps ended."""

    log: MetricsLog
    trace: Trace
    clock: Callable[[], float]
    ends: list[float] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self.ends.append(self.clock())
        self.steps.append(dict(values))
        self.log.write(step + 1, values)

    def on_rollout(self, values: Mapping[str, float], samples: Mapping[str, tuple[int, int]]) -> None:
        pass

    def on_begin(self, work: OngoingWork) -> None:
        pass

    def on_finish(self, work: OngoingWork) -> None:
        pass

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self.log.write(step, values)

    def on_samples(self, number: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def on_warning(self, warning: str) -> None:
        """Fail, as nothing here should need one."""
        raise AssertionError(warning)

    def on_refusal(self, node: str, reason: Refusal, message: str) -> None:
        pass

    def on_retry(self, worker: int, retry: BodyRetry) -> None:
        pass

    def on_span(self, worker: int, span: Span) -> None:
        self.trace.add(worker, span)


def make_plan(args: argparse.Namespace, staleness: int, interrupt: bool) -> Plan:
    trainers, devices = args.trainers, 128
    return launch.plan(
        RECIPE,
        [
            "cluster=h100-16x8",
            f"placement='actor=0-{trainers - 1}:d{trainers} "
            f"actor.gen={trainers}-{devices - 1}:d{devices - trainers}'",
            f"batch={args.batch}",
            f"steps={args.steps}",
            f"schedule.max_staleness={staleness}",
            f"schedule.interrupt={str(interrupt).lower()}",
            f"schedule.max_concurrent={args.concurrent}",
            "model@models.actor=qwen2.5-0.5b",
            "models.actor.gen.engine=vllm",
            f"models.actor.gen.max_running={args.slots}",
            "models.actor.gen.max_model_len=8192",
            f"nodes.actor_gen.max_tokens={args.max_tokens}",
            "nodes.actor_train.prox=loglinear",
            "nodes.actor_train.minibatches=1",
            "nodes.eval_gen.after=1000000",
            "nodes.eval_gen.max_tokens=8",
            "workload.prompt=200",
            f"workload.response_mean={args.mean}",
            f"workload.response_cv={args.cv}",
        ],
    )


def reward_seconds(stretch: float) -> DurationFunction:
    return lambda sample: stretch * Random(sample).expovariate(1 / REWARD_SECONDS)


def durations_of(plan: Plan, stretch: float) -> tuple[dict[str, float | DurationFunction], float, int]:
    """Seconds of everything in the trained stream, those of a token, and slots over all engines."""
    forecast = plan.forecast
    assert forecast.pace is not None
    stream = plan.schedule.streams[0]
    token = stretch * forecast.pace.seconds_per_token
    drawn = response_seconds(dict(forecast.workload)[stream.name], token, SEED)
    found: dict[str, float | DurationFunction] = {row.node: stretch * row.seconds for row in forecast.times}
    return {**found, stream.source: drawn, "score": reward_seconds(stretch)}, token, forecast.pace.slots


async def execute(
    plan: Plan, durations: Durations, token: float, slots: int, num_turns: int = 1
) -> dict[str, Any]:
    """One run on virtual workers."""
    heads = plan.replica("actor@gen").heads
    loop = asyncio.get_running_loop()
    traffic = loop.traffic if isinstance(loop, ControllerTime) else Traffic()
    workers = VirtualWorkers(plan, durations, -(-slots // len(heads)), token, 200, traffic, num_turns)
    order = {stream.name: RowOrder(100_000 if stream.batch else 1, SEED) for stream in plan.schedule.streams}
    with tempfile.TemporaryDirectory() as out:
        directory = RunDirectory.create(out, "virtual", "", "{}\n")
        with closing(MetricsLog(directory.metrics, directory.tensorboard)) as log:
            rows = Rows(log, Trace(), loop.time)
            with Ledger(directory.ledger, make_header(plan)) as ledger:
                checkpoints = Checkpoints(directory.checkpoints)
                run = RunContext.begin(plan, workers, rows, checkpoints, ledger, SEED)
                executor = Executor(run, order)
                found = await _timed(executor, workers)
        rows.trace.write(directory.trace)
        broken = audit(directory.ledger)
        assert not broken, broken
    return {**found, **_summary(plan, rows)}


async def _timed(executor: Executor, workers: VirtualWorkers) -> dict[str, Any]:
    freeze_gc()
    clock = asyncio.get_running_loop().time
    probe = Probe(clock)
    whole, own_thread, begin = time.process_time(), time.thread_time(), clock()
    workers.begin()
    watching = asyncio.create_task(probe.watch())
    try:
        await executor.run()
    finally:
        watching.cancel()
        await workers.close()
    seconds = clock() - begin
    traffic = workers.traffic
    late = sorted(probe.lateness)
    return {
        "seconds": seconds,
        "controller_cpu": time.process_time() - whole - traffic.own_cpu,
        "loop_cpu": time.thread_time() - own_thread - traffic.own_cpu,
        "virtual_cpu": traffic.own_cpu,
        "messages": traffic.messages,
        "events": traffic.events,
        "sent_bytes": traffic.sent_bytes,
        "received_bytes": traffic.received_bytes,
        "slot_seconds": traffic.slot_seconds,
        "late_max": late[-1],
        "late_p99": late[int(0.99 * len(late))],
    }


def _summary(plan: Plan, rows: Rows) -> dict[str, Any]:
    num_steps = len(rows.ends)
    first, last = num_steps // 4, 3 * num_steps // 4
    stride = rows.steps[first + 1 : last + 1]

    def mean(name: str) -> float:
        return statistics.fmean(row.get(name, 0.0) for row in stride)

    return {
        "steps": num_steps,
        "samples": sum(row["batch/samples"] for row in rows.steps),
        "step_seconds": (rows.ends[last] - rows.ends[first]) / (last - first),
        "staleness": mean("staleness/mean"),
        "in_flight": mean("staleness/in_flight"),
        "staleness_max": max(row["staleness/max"] for row in stride),
        "dropped_share": mean("dropped/stale") / mean("batch/samples"),
        "tokens": mean("batch/tokens"),
        "kept_tokens": mean("rollout/kept_tokens"),
        "interrupted": mean("rollout/interrupted"),
    }


def measure(args: argparse.Namespace, staleness: int, interrupt: bool) -> dict[str, Any]:
    plan = make_plan(args, staleness, interrupt)
    durations, token, slots = durations_of(plan, args.stretch)
    with asyncio.Runner(loop_factory=None if args.real else ControllerTime) as runner:
        found = runner.run(execute(plan, durations, token, slots))
    samples = found["samples"]
    assert plan.forecast.period is not None
    simulated = simulate_plan(plan, args.steps)
    return {
        "max_staleness": staleness,
        "interrupt": interrupt,
        **found,
        "samples_per_second": args.batch * 8 / found["step_seconds"],
        "controller_us_per_sample": 1e6 * found["controller_cpu"] / samples,
        "loop_us_per_sample": 1e6 * found["loop_cpu"] / samples,
        "messages_per_second": found["messages"] / found["seconds"],
        "planned": args.stretch * plan.forecast.period.seconds,
        "simulate": args.stretch * simulated.period,
        "same_draws": _same_draws(plan, args.steps, durations, slots),
        **_limits(simulated, args.stretch),
    }


def _same_draws(plan: Plan, steps: int, durations: Durations, slots: int) -> float:
    """Seconds a step of a simulation whose samples take exactly what they took in the run."""
    schedule = replace(trained_part(plan.schedule), num_steps=steps)
    stream = schedule.streams[0].name
    return simulate_run(schedule, durations, slots={stream: slots}).timeline.period()


def _limits(simulated: Simulation, stretch: float) -> dict[str, float]:
    return {
        "generation_alone": stretch * simulated.generation_alone,
        "training_alone": stretch * simulated.training_alone,
        "limit": stretch * simulated.limit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--trainers", type=int, default=14, help="of 128 devices")
    parser.add_argument("--batch", type=int, default=1024, help="groups of 8")
    parser.add_argument("--slots", type=int, default=32, help="of one engine")
    parser.add_argument("--concurrent", type=int, default=8192)
    parser.add_argument("--mean", type=int, default=100)
    parser.add_argument("--cv", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=800)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--stretch", type=float, default=1.0, help="factor of all seconds")
    parser.add_argument(
        "--real", action="store_true", help="time of the clock, on a machine without other work"
    )
    parser.add_argument("--rounds", type=int, default=1, help="interleaved")
    parser.add_argument("--finish-first", action="store_true", help="schedule.interrupt=false too")
    parser.add_argument("--dry", action="store_true", help="write no result")
    parser.add_argument("--name", default="async-virtual", help="of the result file")
    args = parser.parse_args()
    kinds = [(eta, True) for eta in args.staleness]
    kinds += [(eta, False) for eta in args.staleness if eta and args.finish_first]
    runs = []
    for _ in range(args.rounds):
        for staleness, interrupt in kinds:
            runs.append(measure(args, staleness, interrupt))
            print(json.dumps(runs[-1]), flush=True)
    limit = runs[-1]["limit"]
    summary = []
    for staleness, interrupt in kinds:
        same = [r for r in runs if (r["max_staleness"], r["interrupt"]) == (staleness, interrupt)]
        row = {key: statistics.median(run[key] for run in same) for key in same[0]}
        summary.append({**row, "share_of_limit": limit / row["step_seconds"]})
    for row in summary:
        print({key: round(value, 3) for key, value in row.items()})
    if not args.dry:
        content = {"arguments": vars(args), "load": os.getloadavg(), "summary": summary, "runs": runs}
        print(harness.write(args.name, content))


if __name__ == "__main__":
    main()
