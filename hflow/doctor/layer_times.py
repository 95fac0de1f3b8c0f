"""Checks how fast layers are on a device, beside what plans count with."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from hflow.doctor.collectives import MIN_RATE_SHARE
from hflow.doctor.finding import Finding
from hflow.errors import HflowError
from hflow.planner.descriptors import training_backend
from hflow.planner.traits import BACKENDS

if TYPE_CHECKING:
    from hflow.launch.profiling.calibrate import LayerTime

_SLOW = "nvidia-smi -q -d PERFORMANCE shows what slows a GPU down; hflow profile measures it for plans"
_FAILED = "hflow profile shows all of the error"


def check_layer_times(device: str) -> Iterator[Finding]:
    """Check the speed of each training backend that can run on a device, `cuda` or `cpu`."""
    for backend in BACKENDS:
        if training_backend(backend).find_problem(device) is None:
            yield _check(backend, device)


def _check(backend: str, device: str) -> Finding:
    # A process of its own, as what torch keeps on a GPU is freed only when a process ends.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return layers_finding(backend, process.submit(_measure, backend, device).result())
        except (HflowError, RuntimeError, BrokenProcessPool) as error:
            detail = (str(error).splitlines() or [type(error).__name__])[0]
            return Finding("speed", backend, False, detail, _FAILED, required=False)


def _measure(backend: str, device: str) -> list[LayerTime]:
    import torch

    from hflow.launch.profiling.calibrate import layer_times

    if device == "cpu":
        torch.set_num_threads(1)  # a device is one core
    return layer_times(backend, device)


def layers_finding(backend: str, times: Sequence[LayerTime]) -> Finding:
    """Return whether passes through layers are about as fast as plans count with."""
    model = times[0].model
    detail = "; ".join(
        f"{'training' if time.trains else 'inference'} {1000 * time.seconds:,.1f} ms, "
        f"planned {1000 * time.expected_seconds:,.1f} ms"
        for time in times
    )
    detail += (
        f" ({model.num_layers} layers of {model.hidden:,} x {model.intermediate:,}, "
        f"{times[0].num_tokens:,} tokens, {times[0].dtype})"
    )
    if all(time.seconds * MIN_RATE_SHARE <= time.expected_seconds for time in times):
        return Finding("speed", backend, True, detail)
    detail += f"; less than {MIN_RATE_SHARE:.0%} of the planned speed"
    return Finding("speed", backend, False, detail, _SLOW, required=False)
