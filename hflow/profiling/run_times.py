"""`RunTimes`: what a run measured: seconds from its trace and metrics, and lengths from its ledger."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hflow.base.errors import ConfigError
from hflow.config.schema import WorkloadConfig
from hflow.planner.plan.rows import PUBLISH_PREFIX, Plan
from hflow.runtime.ledger.query import select
from hflow.runtime.ledger.schema import COLUMNS
from hflow.runtime.saving.run_directory import RunDirectory, read_metrics

STEP = "step"
"""Key of the seconds of whole steps."""
WARM_STEPS = 2
"""First steps that are left out: they compile, allocate and fill caches."""
MIN_STEPS = 6
"""Steps that are needed after them."""


@dataclass(frozen=True)
class RunTimes:
    """What a run measured, without its first steps."""

    seconds: Mapping[str, tuple[float, ...]]
    """Node, source, replica that loads weights, `publish.REPLICA` or `STEP` -> seconds of each execution, in
    order. Of a node on several ranks the slowest counts."""
    workload: WorkloadConfig
    """Lengths of the samples that were trained on."""


def read_run_times(run: RunDirectory, plan: Plan) -> RunTimes:
    """Read what a run of a plan measured.

    Raises:
        ConfigError: if it has too few steps.
    """
    rows: list[dict[str, Any]] = [*read_metrics(run.metrics)]
    steps = {int(row["step"]): row for row in rows if "time/step_seconds" in row}
    if len(steps) < WARM_STEPS + MIN_STEPS:
        raise ConfigError(
            f"{run.path} has {len(steps)} complete steps, but calibrate needs {WARM_STEPS + MIN_STEPS}; "
            "choose a longer run"
        )
    evaluated = {int(row["step"]) for row in rows if "time/step_seconds" not in row}
    spans = _spans(run, plan, evaluated)
    found = {name: tuple(by_step[key] for key in sorted(by_step)) for name, by_step in spans.items()}
    found[STEP] = tuple(
        row["time/step_seconds"] for step, row in sorted(steps.items()) if step - 1 not in evaluated
    )
    if _separate_engines(plan):
        found[plan.schedule.streams[0].source] = tuple(_batch_seconds(steps.values(), plan))
    return RunTimes({name: times[WARM_STEPS:] for name, times in found.items()}, _lengths(run, plan))


def _spans(run: RunDirectory, plan: Plan, evaluated: set[int]) -> dict[str, dict[int, float]]:
    """Return name -> step or version -> seconds of the slowest rank.

    The turn of an engine that shares its devices is the time of its source. Turns in which it also evaluated
    are left out.
    """
    stream = plan.schedule.streams[0]
    names = {f"weights {replica.name}": replica.name for replica in plan.replicas}
    names |= {f"publish {replica.name}": PUBLISH_PREFIX + replica.name for replica in plan.replicas}
    if not _separate_engines(plan):
        names |= {f"generate {replica}": stream.source for replica in stream.replicas}
    found: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for event in json.loads(run.trace.read_text(encoding="utf-8"))["traceEvents"]:
        args: Mapping[str, Any] = event["args"]
        key = args.get("step", args.get("version"))
        if event["ph"] != "X" or key is None:
            continue
        name = names.get(event["name"], event["name"])
        if name != stream.source or key not in evaluated:
            found[name][key] = max(found[name][key], event["dur"] * 1e-6)
    return found


def _separate_engines(plan: Plan) -> bool:
    """Return whether the trained stream's engines have devices of their own."""
    shared = {replica for _, replicas in plan.schedule.shared for replica in replicas}
    return not shared.issuperset(plan.schedule.streams[0].replicas)


def _batch_seconds(steps: Iterable[Mapping[str, float]], plan: Plan) -> Iterable[float]:
    """Yield the seconds for which each engine generated per step, for as many tokens as a batch has."""
    source = plan.schedule.streams[0].source
    for row in steps:
        needed = row[f"{source}/num_tokens"] * row["batch/samples"]
        made = row["time/generated_tokens_per_second"] * row["time/step_seconds"]
        if made and row["busy/engines"]:
            yield row["busy/engines"] * row["time/step_seconds"] * needed / made


def _lengths(run: RunDirectory, plan: Plan) -> WorkloadConfig:
    """Return mean lengths, and the spread of responses."""
    stream = plan.schedule.streams[0].name
    length, tokens = list(COLUMNS).index("length"), list(COLUMNS).index("tokens")
    rows = select(run.ledger, f"stream = '{stream}' AND \"end\" = 'trained'").rows
    responses = [row[tokens] for row in rows]
    mean = statistics.fmean(responses)
    return WorkloadConfig(
        prompt=max(1, round(statistics.fmean(row[length] for row in rows) - mean)),
        response_mean=max(1.0, mean),
        response_cv=statistics.pstdev(responses) / mean,
    )
