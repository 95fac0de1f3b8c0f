"""Small runs on real devices: each is `hflow run` with settings that need one part of hflow.

A run trains a tiny model for two steps and compares log-probs of engine and trainer, so it notices wrong
results of collectives, weight transports and kernels. Some run twice, and compare what both have saved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hflow.base.shipped import find_recipe
from hflow.doctor.finding import Finding
from hflow.planner.models.descriptors import TrialRun, descriptor
from hflow.planner.plan.channels import CHANNELS, channel_kind
from hflow.planner.plan.hardware import GIB, Device
from hflow.planner.plan.traits import BACKENDS, ENGINES, first_with
from hflow.processes.child import import_path

TIMEOUT = 600.0
"""Seconds that one run may take."""
MAX_GAP = 0.1
"""Largest mean difference between the log-probs of engine and trainer, in nats. In bf16 it is about 0.01."""
MAX_REROUTED = 0.1
"""Largest share of tokens and layers for which the trainer would choose other experts than the engine. Of
records of other tokens it is about 0.8 for the tiny model."""

LEFT_FREE = 0.15
"""Share of a GPU's memory that a cache which fills it leaves to the runtimes of two processes and buffers."""

REAL_SIZES = {"qwen2.5-0.5b": 16.0, "qwen3-4b": 72.0}
"""Configuration of a model -> the GiB of a GPU on which all of its weights can be trained."""
ALPHABET = "0123456789+="
"""The characters of the task, which are the tokens of a model without a tokenizer."""

_SAVED = "*/latest/checkpoints/latest/*/**/*.safetensors"
"""Weights and optimizer of the last checkpoint."""
_EMBEDDED = "models.actor.gen.engine=embedded"
_DETERMINISTIC = "deterministic=true"


@cache
def trial_runs() -> tuple[TrialRun, ...]:
    """Return the runs that need nothing else, and those of each channel, backend and engine."""
    return (
        TrialRun("one device", "training and generation in turns: kernels, sleep and wake", (_EMBEDDED,), 1),
        TrialRun(
            "fsdp",
            "collectives and FSDP2 over all devices",
            (_EMBEDDED, "models.actor.layout=d{n}"),
            min_devices=2,
        ),
        *_channel_trials(),
        *(_real_size(model, memory_gib) for model, memory_gib in REAL_SIZES.items()),
        TrialRun(
            "equal runs",
            "FSDP2, and attention's backward pass, with deterministic=true",
            (_DETERMINISTIC, "models.actor.layout=d{n}"),
            recipe="sft",
            is_repeated=True,
        ),
        *(run for name in (*BACKENDS, *ENGINES) for run in descriptor(name).trial_runs),
    )


def _real_size(model: str, memory_gib: float) -> TrialRun:
    """Return a run of a model of this configuration with random weights, for which nothing is fetched."""
    settings = (
        _EMBEDDED,
        "models.actor.path=null",
        f"model@models.actor={model}",
        f'models.actor.alphabet="{ALPHABET}"',
        "models.actor.save_optimizer=false",
    )
    purpose = "training and generation at a real size, with random weights"
    return TrialRun(model, purpose, settings, 1, on_cpu=False, min_memory_gib=memory_gib)


def _channel_trials() -> Iterator[TrialRun]:
    """Yield a run for each channel that says what to try: with the engine beside the trainer or apart."""
    engine = first_with("has_own_process", ENGINES)
    beside, package = f"models.actor.gen.engine={engine}", descriptor(engine).packages[0]
    for kind in map(channel_kind, CHANNELS.own):
        transport = f"models.actor.gen.transport={kind.name}"
        if kind.trial and kind.traits.needs_one_device:
            yield TrialRun(kind.name, kind.trial, (beside, transport), 1, package=package, on_cpu=False)
        elif kind.trial:
            apart = (_EMBEDDED, "placement=actor=0 actor.gen=1", transport)
            yield TrialRun(kind.name, kind.trial, apart, 2, 2)


def trial_device() -> Device | None:
    """Return the figures with which runs on the GPUs of this machine are planned; None if there are none."""
    from hflow.profiling.calibrate import similar_device

    return similar_device(find_recipe(TrialRun.recipe))


def try_runs(num_gpus: int, memory_gib: float | None, device: Device | None) -> Iterator[Finding]:
    """Yield the result of each run on GPUs with `memory_gib` each; 0 GPUs for two CPU processes.

    `device` has the figures of one GPU (`trial_device`); None: there are none.
    """
    for run in trial_runs():
        reason = _obstacle(run, num_gpus, memory_gib, device)
        if reason is not None:
            yield Finding("trial", run.name, False, f"{run.purpose}: not checked, {reason}", required=False)
        else:
            yield _try(run, num_gpus, memory_gib, device)


def _obstacle(run: TrialRun, num_gpus: int, memory_gib: float | None, device: Device | None) -> str | None:
    if num_gpus == 0 and not run.on_cpu:
        return "it needs a GPU"
    if num_gpus and device is None:
        return "hflow has no figures of a GPU with this compute capability"
    if 0 < num_gpus < run.min_devices:
        return f"it needs {run.min_devices} GPUs"
    if num_gpus and (memory_gib or 0.0) < run.min_memory_gib:
        return f"it needs a GPU with {run.min_memory_gib:.0f} GiB"
    if device is not None and run.precision not in (None, *device.tflops):
        return f"it needs a GPU that computes in {run.precision}"
    if run.package is not None and find_spec(run.package) is None:
        return f"{run.package} is not installed"
    if max(run.min_devices, run.num_devices or 1) > 1 and not _has_ray():
        return "it needs several processes, and ray is not installed"
    return None


def _has_ray() -> bool:
    """Return whether runs can have worker processes. Without them they use one device."""
    return find_spec("ray") is not None


def command(
    run: TrialRun, num_gpus: int, memory_gib: float | None, device: Device | None, out: str
) -> list[str]:
    """Return the command of a run, whose results go to the directory `out`; for the others see `try_runs`."""
    num = run.num_devices or (num_gpus or 2 if _has_ray() else 1)
    num -= num % run.multiple
    cluster = [f"cluster=cpu-1x{num}"]
    if num_gpus:
        assert device is not None
        cluster = [f"cluster={device.name}-1x{num}", f"device_memory_gib={memory_gib:.1f}"]
    values = {"n": num, "half": num // 2, "cache_gib": cache_that_fills(memory_gib or 0.0)}
    settings = [text.format(**values) for text in run.overrides]
    size = ["steps=2", f"batch={8 * num}", "nodes.eval_gen.after=1000", "data.heldout.limit=4"]
    return [
        sys.executable,
        "-m",
        "hflow",
        "run",
        run.recipe,
        "--plain",
        *size,
        *cluster,
        *settings,
        *(() if _has_ray() else ("workers=inproc",)),
        f"out={out}",
    ]


def cache_that_fills(memory_gib: float) -> float:
    """Return the GiB of a KV cache that takes a GPU's memory, but for what everything else on it needs."""
    return round((1 - LEFT_FREE) * memory_gib, 1)


def _try(run: TrialRun, num_gpus: int, memory_gib: float | None, device: Device | None) -> Finding:
    with tempfile.TemporaryDirectory(prefix="hflow-doctor-") as temporary:
        started = time.monotonic()
        directories = [Path(temporary) / name for name in ("first", "second")[: 1 + run.is_repeated]]
        for directory in directories:
            directory.mkdir()
            arguments = command(run, num_gpus, memory_gib, device, str(directory))
            if (problem := _execute(arguments, directory)) is not None:
                return Finding("trial", run.name, False, f"{run.purpose}: {problem}", _fix(arguments))
        begin = f"{run.purpose}: {time.monotonic() - started:.0f} s"
        if run.is_repeated:
            difference = _first_difference(*directories)
            detail = f"{begin}, " + (difference or "two runs end with the same weights and optimizer")
            return Finding("trial", run.name, difference is None, detail, _fix(arguments))
        (directory,) = directories
        gap, sleep = _largest(directory, "engine_gap"), _last_sleep(directory)
        rerouted = _largest(directory, "rerouted") if run.replays_experts else 0.0
    detail = f"{begin}, log-probs of engine and trainer differ by {gap:.2g}{sleep.text}"
    wanted = cache_that_fills(memory_gib or 0.0) if run.fills_memory else 0.0
    is_right = gap <= MAX_GAP and sleep.freed_gib >= wanted and rerouted <= MAX_REROUTED
    if run.replays_experts:
        detail += f", the trainer would choose others for {rerouted:.1%} of tokens and layers"
    if sleep.freed_gib < wanted:
        detail += f", but its cache has {wanted:.1f} GiB"
    return Finding("trial", run.name, is_right, detail, _fix(arguments))


def _execute(arguments: list[str], directory: Path) -> str | None:
    """Run in an empty directory, so that no file of the user's takes part; returns what went wrong."""
    try:
        result = subprocess.run(
            arguments,
            cwd=directory,
            env={**os.environ, **import_path()},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {TIMEOUT:.0f} s"
    lines = (result.stderr.strip() or result.stdout.strip() or "no message").splitlines()
    return lines[-1] if result.returncode else None


def _first_difference(first: Path, second: Path) -> str | None:
    """Return the difference of two runs' saved tensors; None if all are equal bit for bit."""
    files = sorted(path.relative_to(first) for path in first.glob(_SAVED))
    if not files or len(files) != len(list(second.glob(_SAVED))):
        return "a run saved no weights"
    different = [path for path in files if (first / path).read_bytes() != (second / path).read_bytes()]
    if not different:
        return None
    return (
        f"two runs differ in {different[0].name}, and in {len(different)} of {len(files)} files with tensors"
    )


def _fix(arguments: list[str]) -> str:
    shown = [part for part in arguments[3:] if not part.startswith("out=")]
    return "see all of its output: hflow " + " ".join(f"'{part}'" if " " in part else part for part in shown)


@dataclass(frozen=True)
class _Sleep:
    """What an engine freed on a GPU when it last slept, and how long it took."""

    freed_gib: float = 0.0
    seconds: float = 0.0
    waking_seconds: float = 0.0

    @property
    def text(self) -> str:
        if not self.seconds:
            return ""
        return (
            f", the engine frees {self.freed_gib:.1f} GiB in {self.seconds:.1f} s "
            f"and takes it again in {self.waking_seconds:.1f} s"
        )


def _last_sleep(out: Path) -> _Sleep:
    """Return the last change of an engine's memory in the run's trace; nothing if it used no GPU."""
    (trace,) = out.glob("grpo/latest/trace.json")
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    found = {"sleep": 0.0, "allocate weights": 0.0, "allocate cache": 0.0}
    freed = 0.0
    for span in sorted(spans, key=lambda span: span["ts"]):
        what = span["name"].rpartition(" ")[0]
        if what in found and "freed_bytes" in span["args"]:
            found[what] = span["dur"] / 1e6
            freed = span["args"]["freed_bytes"] / GIB if what == "sleep" else freed
    return _Sleep(freed, found["sleep"], found["allocate weights"] + found["allocate cache"])


def _largest(out: Path, metric: str) -> float:
    """Return the largest value of a train node's metric in any step of the run; infinity if it has none."""
    (metrics,) = out.glob("grpo/latest/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    name = f"actor_train/{metric}"
    return max((row[name] for row in rows if name in row), default=float("inf"))
