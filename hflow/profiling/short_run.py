"""`measure_overheads`: what samples and messages take besides kernels, from a short run on this machine.

The run is the shipped recipe of GRPO on all devices, with a tiny model. What its generation takes beyond the
planner's seconds of the engine is divided by its samples, and what a step takes beyond its nodes is divided
by these.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hflow.base.files import resolved
from hflow.planner.plan.calibration import Calibration
from hflow.planner.plan.rows import Plan
from hflow.profiling.from_run import (
    Predict,
    held_out_miss,
    message_seconds,
    planned_run,
    seen_medians,
    step_seconds,
)
from hflow.profiling.run_times import MIN_STEPS, STEP, WARM_STEPS, RunTimes
from hflow.runtime.saving.run_directory import RunDirectory

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
    """With `Calibration.process_us`."""
    missed: float


def measure_overheads(kernels: Calibration, file: Path, device: str, num_devices: int) -> Overheads:
    """Run a recipe, and return what it takes beside what the planner predicts for its kernels.

    Raises:
        ShortRunError: if the run fails.
    """
    settings = [
        *(f"cluster={device}-1x{num_devices}", f"placement=actor,actor.gen=all:d{num_devices}"),
        *("models.actor.path=null", "models.actor.gen.engine=embedded"),
        *(f"steps={NUM_STEPS}", f"batch={BATCH}", "nodes.eval_gen.after=100000", "save_every=100000"),
        *("workload.response_cv=0", f"calibration={resolved(file)}", f"name={NAME}"),
    ]
    with tempfile.TemporaryDirectory(prefix="hflow-profile-") as directory:
        _run(settings, Path(directory), device)
        plan, times, predict = planned_run(RunDirectory(Path(directory) / NAME / "latest"))
        num_samples = BATCH * plan.schedule.streams[0].group_size
        return find_overheads(kernels, plan, times, predict, num_samples)


def find_overheads(
    kernels: Calibration, plan: Plan, times: RunTimes, predict: Predict, num_samples: int
) -> Overheads:
    """Return the seconds of a run beside its kernels, with this size of batches. Some steps are held out."""
    base = replace(kernels, sample_us=0.0, node_us=0.0, process_us=0.0)
    medians, predicted = seen_medians(times), predict(base)
    source = plan.schedule.streams[0].source
    sample = max(0.0, medians[source] - predicted[source]) / num_samples
    measured = {name: medians[name] for name in predicted if name in medians}
    node = message_seconds(plan, measured, medians[STEP])
    found = replace(base, sample_us=sample * 1e6, node_us=node * 1e6)
    missed = held_out_miss(step_seconds(plan, predict(found)), times.seconds[STEP])
    return Overheads(found.sample_us, found.node_us, missed)


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
