"""`learn_from_run`: figures that explain what a run measured, for `calibrate=RUN`.

The planner predicts the seconds of the run's nodes from the figures that the run was planned with. These
then change as little as explains what was measured: their logarithms minimise

    sum over nodes of share * (log predicted - log measured)^2 / NOISE^2  +  sum over figures of change^2

where `share` is a node's part of all seconds. A change of 1 is a factor of e for times of hosts, and of 1.28
(e to the `RATE_PRIOR`) for rates, which vary less. Figures that no node of the run depends on stay as they
were. What a step takes beyond its nodes is the time of messages (`node_us`). Some measurements are held out
(`fit.split_held_out`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hflow.base.errors import ConfigError, PlanError
from hflow.base.files import resolved
from hflow.base.validation import from_mapping
from hflow.config.schema import ONE_PROCESS
from hflow.graph.ir import Level
from hflow.launch.planning.plan_file import read_plan_file
from hflow.launch.planning.read_recipe import read_recipe
from hflow.launch.planning.request import LearnedFromRun, calibration_of, plan_request
from hflow.launch.targets import resolve
from hflow.planner.compile import compile_plan
from hflow.planner.forecast.cost import node_times
from hflow.planner.forecast.period import steady_period
from hflow.planner.forecast.traffic import estimate_traffic
from hflow.planner.plan.calibration import Calibration
from hflow.planner.plan.request import stream_workloads
from hflow.planner.plan.rows import Plan
from hflow.profiling.fit import split_held_out
from hflow.profiling.run_times import STEP, RunTimes, read_run_times
from hflow.runtime.saving.run_directory import RunDirectory

NOISE = 0.02
"""Relative error of the median of a node's seconds that the fit expects."""
RATE_PRIOR = 0.25
"""Standard deviation of the logarithm of rates, relative to that of times."""
MAX_ITERATIONS = 12
"""Most steps of the fit."""
NUM_BISECTIONS = 20
"""Halvings of the interval that contains the time of messages."""
DELTA = 0.01
"""Change of a figure in which the fit measures slopes."""
MIN_CHANGE = 0.005
"""A figure that changes by less was not measured."""
# Names of fields in `planner.plan.calibration`, each for one kind of figure in all dataclasses there.
RATES = ("share", "attention", "decode", "stream", "store_gb_per_s", "disk_gb_per_s", "checksum_gb_per_s")
TIMES = (
    "kernel_us",
    "launch_us",
    "layer_us",
    "gap_us",
    "step_us",
    "sequence_us",
    "tensor_us",
    "sample_us",
    "passes",
)
FIGURES = frozenset((*RATES, *TIMES))
"""Names of the figures that a run corrects. Others describe shapes, which one run does not show."""

Predict = Callable[[Calibration], Mapping[str, float]]
"""Returns the seconds of each node by the cost model."""


def learn_from_run(run: str, device: str) -> LearnedFromRun:
    """Correct the figures that a run on devices of a name was planned with by what it measured.

    Raises:
        ConfigError: if there is no such run, or it has no trace, too few steps, or one process for several
            devices.
        PlanError: if it ran on other devices.
    """
    directory = resolve(run).require_run()
    if not directory.trace.is_file():
        raise ConfigError(f"{directory.path} has no {directory.trace.name}; choose another run")
    if directory.is_running:
        raise ConfigError(f"the run in {directory.path} has not ended; wait for it, or choose another run")
    file = read_plan_file(directory.path)
    config = file.configuration()
    base = calibration_of(file.rows["hardware"]["calibration"], file.path)
    if file.rows["hardware"].get("others"):
        raise ConfigError(f"calibrate={run} ran on several kinds of devices; choose a run on {device} alone")
    measured_on = file.rows["hardware"]["device"]["name"]
    if measured_on != device:
        raise PlanError(
            f"calibrate={run} ran on {measured_on}, but the cluster has {device}; choose a run on these "
            "devices, or set calibrate=null"
        )
    if config.workers in ONE_PROCESS and file.rows["cluster"]["devices_per_node"] > 1:
        raise ConfigError(
            f"calibrate={run} ran {file.rows['cluster']['name']} in one process, so its times are not those "
            "of its devices; choose a run with workers=ray"
        )
    path = resolved(directory.path)
    plan, times, predict = planned_run(directory)
    found, missed = fit_run(base, plan, times, predict)
    num_steps = len(times.seconds[STEP])
    source = f"{num_steps} steps of {path.parent.name}/{path.name}, which correct {base.name}"
    return LearnedFromRun(
        replace(
            found,
            name=path.parent.name,
            devices=(device,),
            source=source,
            is_measured=True,
            published={},
            missed=missed,
            unmeasured=_unchanged(base, found),
        ),
        times.workload,
    )


def planned_run(directory: RunDirectory) -> tuple[Plan, RunTimes, Predict]:
    """Return a run's plan, what it measured, and the predictions for its own lengths.

    Raises:
        ConfigError: if it has too few steps.
    """
    file = read_plan_file(directory.path)
    base = file.configuration()
    config, graph, _ = read_recipe(file.recipe, config=replace(base, calibration=None, calibrate=None))
    request = replace(plan_request(config, graph, file.recipe), engines=file.engines)
    plan = compile_plan(graph, request)
    times = read_run_times(directory, plan)
    request = replace(request, workload=times.workload)
    lengths = dict(stream_workloads(plan, request))
    traffic = estimate_traffic(plan, request, lengths[plan.schedule.streams[0].name])

    def predict(calibration: Calibration) -> Mapping[str, float]:
        hardware = replace(request.hardware, calibration=calibration)
        rows = node_times(plan, replace(request, hardware=hardware), lengths, traffic)
        return {row.node: row.seconds for row in rows}

    return plan, times, predict


def fit_run(
    base: Calibration, plan: Plan, times: RunTimes, predict: Predict
) -> tuple[Calibration, dict[str, float]]:
    """Return the figures that explain a run, and how far they miss the executions that were held out."""
    medians = seen_medians(times)
    base = replace(base, node_us=0.0, process_us=0.0)
    measured = {name: medians[name] for name, seconds in predict(base).items() if seconds and name in medians}
    found = _fit(base, measured, predict)
    predicted = dict(predict(found))
    found = replace(found, node_us=message_seconds(plan, measured, medians[STEP]) * 1e6)
    predicted[STEP] = step_seconds(plan, predict(found))
    missed = {
        name: held_out_miss(predicted[name], times.seconds[name])
        for name in (*measured, STEP)
        if split_held_out(times.seconds[name])[1]
    }
    return found, missed


def seen_medians(times: RunTimes) -> dict[str, float]:
    """Return the median seconds of what ran, without the executions that are held out."""
    seen = {name: split_held_out(seconds)[0] for name, seconds in times.seconds.items()}
    return {name: statistics.median(seconds) for name, seconds in seen.items() if seconds}


def held_out_miss(predicted: float, measured: Sequence[float]) -> float:
    """Return the mean absolute error on the executions that were held out."""
    _, held_out = split_held_out(measured)
    return statistics.fmean(abs(predicted / seconds - 1) for seconds in held_out)


def _fit(base: Calibration, measured: Mapping[str, float], predict: Predict) -> Calibration:
    """Return the figures that explain the seconds of each node (Gauss-Newton on logarithms)."""
    names = [name for name, value in _figures(asdict(base)) if value > 0]
    total = sum(measured.values())
    weights = np.array([math.sqrt(seconds / total) / NOISE for seconds in measured.values()])
    priors = np.array([1.0 if name.rpartition(".")[2] in TIMES else RATE_PRIOR for name in names])

    def calibration(changes: npt.NDArray[np.float64]) -> Calibration:
        return _changed(base, dict(zip(names, changes * priors, strict=True)))

    def misses(changes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        predicted = predict(calibration(changes))
        logs = [math.log(seconds / predicted[name]) for name, seconds in measured.items()]
        found: npt.NDArray[np.float64] = np.array(logs) * weights
        return found

    changes = np.zeros(len(names))
    for _ in range(MAX_ITERATIONS):
        here = misses(changes)
        steps = np.eye(len(names)) * DELTA
        slopes = np.stack([(misses(changes + step) - here) / DELTA for step in steps], axis=1)
        # The ridge of 1 pulls every figure towards its value before the run.
        move = np.linalg.solve(slopes.T @ slopes + np.eye(len(names)), -slopes.T @ here - changes)
        changes = changes + np.clip(move, -1.0, 1.0)
        if np.abs(move).max() < MIN_CHANGE / 10:
            break
    return calibration(changes)


def message_seconds(plan: Plan, measured: Mapping[str, float], wanted: float) -> float:
    """Return the seconds of messages of each node, so that a step takes what it did (bisection)."""
    nodes = [node.name for node in plan.schedule.nodes if node.level is Level.BATCH]
    nodes += [route.dst for route in plan.weights]
    low, high = 0.0, wanted
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        with_messages = {name: measured.get(name, 0.0) + middle for name in nodes}
        is_less = step_seconds(plan, {**measured, **with_messages}) < wanted
        low, high = (middle, high) if is_less else (low, middle)
    return low


def step_seconds(plan: Plan, seconds: Mapping[str, float]) -> float:
    """Return the seconds of a step, given those of its nodes."""
    period = steady_period(plan.schedule, seconds)
    return 0.0 if period is None else period.seconds


def _figures(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the dotted name and value of each figure that a run can correct."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{key}.")
        elif key in FIGURES and isinstance(value, float):
            yield f"{prefix}{key}", value


def _changed(base: Calibration, changes: Mapping[str, float]) -> Calibration:
    """Return the figures, each times e to its change."""
    values = asdict(base)
    for name, change in changes.items():
        *path, last = name.split(".")
        row = values
        for key in path:
            row[key] = dict(row[key])
            row = row[key]
        row[last] *= math.exp(change)
    return from_mapping(Calibration, values)


def _unchanged(base: Calibration, found: Calibration) -> tuple[str, ...]:
    """Return the parts of the figures that a run did not show."""
    before, after = dict(_figures(asdict(base))), dict(_figures(asdict(found)))
    changed = {_part(name) for name in before if abs(after[name] - before[name]) > MIN_CHANGE * before[name]}
    return tuple(dict.fromkeys(part for part in map(_part, before) if part not in changed))


def _part(name: str) -> str:
    """Return the part of a calibration that a figure belongs to: `host.torch.layer_us` -> `torch`."""
    first, *rest = name.split(".")
    return " ".join((first, rest[0])) if first == "matmul" else rest[0] if first == "host" else first
