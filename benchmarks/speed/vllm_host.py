"""CPU time of an engine's process outside of vLLM's model, for each sequence of a decode step.

    python -m benchmarks.speed.vllm_host

The times are those of the thread that steps vLLM, on a CPU, with a tiny model. The time in which hflow gives
tokens to requests is compared with that in which vLLM schedules and handles outputs, round by round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lib import harness
from benchmarks.lib.neighbour import architecture
from hflow.engines.interface import EngineSetup, SamplingParams
from hflow.engines.process.engine import write_config
from hflow.engines.process.engine_process import ProcessSettings
from hflow.engines.request import new_request
from hflow.engines.vllm.engine import vllm_launch
from hflow.models.hf_config import read_config
from hflow.models.settings import ModelSettings

MAX_LENGTH = 512


def build(sequences: int) -> Any:
    """Return a stepper with a tiny model, built in this process."""
    settings = ModelSettings(name="actor", trainable=True, architecture=architecture(1, 128, MAX_LENGTH))
    setup = EngineSetup(settings, {"max_running": sequences, "max_model_len": MAX_LENGTH})
    launch = vllm_launch(setup)
    os.environ.update(launch.environment)
    directory = tempfile.mkdtemp()
    model = write_config(settings, read_config(settings), Path(directory) / "model")
    arguments = launch.arguments(model, MAX_LENGTH)
    from hflow.engines.vllm.stepper import VllmStepper

    built = ProcessSettings("engine", "vLLM", "", settings, arguments, directory, None, (), False, False, ())
    stepper = VllmStepper(built, None)
    stepper.set_version(1)
    return stepper


def timed(seconds: Counter[str], key: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that adds its CPU seconds to a key."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        result = call(*args, **kwargs)
        seconds[key] += time.thread_time() - start  # type: ignore[assignment]
        return result

    return measured


def watch(stepper: Any) -> Counter[str]:
    """Return a counter that collects the CPU seconds of a stepper's parts."""
    seconds = Counter[str]()
    core = stepper._core.engine_core
    for owner, method, key in (
        (core.scheduler, "schedule", "scheduler"),
        (core.scheduler, "update_from_output", "scheduler"),
        (stepper._core, "get_output", "vllm"),
    ):
        setattr(owner, method, timed(seconds, key, getattr(owner, method)))
    return seconds


def measure(stepper: Any, seconds: Counter[str], sequences: int, steps: int) -> dict[str, float]:
    """Return the microseconds of hflow and of vLLM's scheduler for each sequence and step."""
    seconds.clear()
    params = [SamplingParams(max_tokens=steps, seed=seed) for seed in range(sequences)]
    stepper.add([new_request(i, [5, 6, 7], p, MAX_LENGTH, 32, None) for i, p in enumerate(params)])
    step = timed(seconds, "step", stepper.step)
    while stepper.num_unfinished:
        step()
    to_us = 1e6 / (sequences * steps)
    hflow, scheduler = (seconds["step"] - seconds["vllm"]) * to_us, seconds["scheduler"] * to_us
    return {"hflow_us": hflow, "scheduler_us": scheduler, "ratio": hflow / scheduler}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    stepper = build(args.sequences)
    seconds = watch(stepper)
    measure(stepper, seconds, args.sequences, args.steps)
    rows = [measure(stepper, seconds, args.sequences, args.steps) for _ in range(args.rounds)]
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    print(medians)
    print(harness.write("vllm-host", {"config": harness.numbers(args), "medians": medians, "rows": rows}))


if __name__ == "__main__":
    main()
