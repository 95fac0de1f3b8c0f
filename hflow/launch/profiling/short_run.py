"""`measure_overheads`: what samples and messages take besides kernels, from a short run on this machine.

The run is the shipped recipe of GRPO on all devices, with a tiny model. What its generation takes beyond the
planner's seconds of the engine is divided by its samples, and what a step takes beyond its nodes is divided
by these.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hflow.launch.profiling.from_run import Predict, message_seconds, planned_run, step_seconds
from hflow.launch.profiling.run_times import MIN_STEPS, STEP, WARM_STEPS, RunTimes
from hflow.planner.calibration import Calibration
from hflow.planner.ir import Plan
from hflow.runtime.execution.run_directory import RunDirectory

BATCH = 64
NUM_STEPS = WARM_STEPS + MIN_STEPS + 4
TIMEOUT = 120.0
"""Seconds that the run may take."""
NAME = "profile"


class ShortRunError(Exception):
    """The run failed; the message is the last line that it printed."""


@dataclass(frozen=True)
class Overheads:
    """Figures of a calibration, and how far a step that they were not fitted to is missed."""

    sample_us: float
    node_us: float
    missed: float


def measure_overheads(calibration: Path, device: str, num_devices: int, workers: str = "ray") -> Overheads:
    """Run a recipe, and return what it takes beside what the planner predicts for its kernels.

    Args:
        calibration: file with the figures of kernels.
        device: its name in the hardware files.
        num_devices: of this machine.
        workers: `ray`, or `inproc` for one device.

    Raises:
        ShortRunError: if the run fails.
    """
    settings = [
        *(f"cluster={device}-1x{num_devices}", f"placement=actor,actor.gen=all:d{num_devices}"),
        *("models.actor.path=null", "models.actor.gen.engine=embedded", f"workers={workers}"),
        *(f"steps={NUM_STEPS}", f"batch={BATCH}", "nodes.eval_gen.after=100000", "save_every=100000"),
        *("workload.response_cv=0", f"calibration={calibration.resolve()}", f"name={NAME}"),
    ]
    with tempfile.TemporaryDirectory(prefix="hflow-profile-") as directory:
        _run(settings, Path(directory), device)
        plan, times, predict = planned_run(RunDirectory(Path(directory) / NAME / "latest"))
        num_samples = BATCH * plan.schedule.streams[0].group_size
        return find_overheads(plan, times, predict, num_samples)


def find_overheads(plan: Plan, times: RunTimes, predict: Predict, num_samples: int) -> Overheads:
    """Return what a run took beside its kernels. Every third step is held out.

    Args:
        plan: the run's plan, whose calibration has the figures of kernels.
        times: what the run measured.
        predict: predictions by the cost model.
        num_samples: of a batch.
    """
    assert plan.hardware is not None
    base = replace(plan.hardware.calibration, sample_us=0.0, node_us=0.0)
    seen = {name: [x for i, x in enumerate(row) if i % 3 != 2] for name, row in times.seconds.items()}
    medians = {name: statistics.median(row) for name, row in seen.items() if row}
    kernels, source = predict(base), plan.schedule.streams[0].source
    sample = max(0.0, medians[source] - kernels[source]) / num_samples
    measured = {name: medians[name] for name in kernels if name in medians}
    node = message_seconds(plan, measured, medians[STEP])
    found = replace(base, sample_us=sample * 1e6, node_us=node * 1e6)
    return Overheads(found.sample_us, found.node_us, _missed(plan, times, predict, found))


def _missed(plan: Plan, times: RunTimes, predict: Predict, found: Calibration) -> float:
    predicted = step_seconds(plan, predict(found))
    return statistics.fmean(abs(predicted / seconds - 1) for seconds in times.seconds[STEP][2::3])


def _run(settings: Sequence[str], directory: Path, device: str) -> None:
    """Run in an empty directory, so that no file of the user's takes part."""
    environment: Mapping[str, str] = {**os.environ, "OMP_NUM_THREADS": "1"} if device == "cpu" else os.environ
    command = [sys.executable, "-m", "hflow", "run", "grpo", "--plain", *settings, f"out={directory}"]
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ShortRunError(f"not done after {TIMEOUT:.0f} s") from None
    if done.returncode:
        raise ShortRunError((done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1])
