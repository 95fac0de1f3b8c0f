"""What this machine can run, and the one command that mends what it cannot."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

GIB = 2**30

PACKAGES = ("hflow", "torch", "transformers", "ray", "hydra-core", "networkx", "safetensors", "tokenizers")

RAY_PROBE = """
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
assert ray.get(ray.remote(lambda: 1).remote(), timeout=30) == 1
"""
RAY_TIMEOUT = 90.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    name: str
    ok: bool
    detail: str
    remedy: str = ""
    """A command, or what to know, where it is not ok."""
    required: bool = True
    """Whether hflow cannot run without it."""


@dataclass(frozen=True)
class Part:
    """A backend or engine: hflow's own module, and the packages that it stands on."""

    topic: str
    name: str
    module: str
    packages: tuple[str, ...]
    """(importable) names."""
    install: str
    required: bool


PARTS = (
    Part("backend", "torch", "hflow.backends.torch_model", ("torch", "transformers"), "make env", True),
    Part("backend", "megatron", "hflow.backends.megatron", ("megatron",), "pip install megatron-core", False),
    Part("engine", "embedded", "hflow.backends.embedded_engine", ("torch", "transformers"), "make env", True),
    Part("engine", "vllm", "hflow.backends.vllm_engine", ("vllm",), "pip install vllm", False),
)


def examine(start_ray: bool = True) -> Iterator[Finding]:
    """Look at versions, devices, backends, engines and Ray, whose trial start takes seconds."""
    yield Finding("version", "python", sys.version_info >= (3, 11), platform.python_version(), "Python 3.11")
    yield from map(_version, PACKAGES)
    yield _cpu()
    yield from _cuda()
    yield from map(_part, PARTS)
    if start_ray:
        yield _ray()


def _version(package: str) -> Finding:
    try:
        return Finding("version", package, True, metadata.version(package))
    except metadata.PackageNotFoundError:
        return Finding("version", package, False, "not installed", "make env")


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return Finding("device", "cpu", True, f"{cores} cores, {memory:.0f} GiB")


def _cuda() -> Iterator[Finding]:
    if find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        why = "no device" if torch.version.cuda else f"torch {torch.__version__} is a build without CUDA"
        yield Finding("device", "cuda", False, why, "plans for GPUs still work here", required=False)
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield Finding("device", f"cuda:{index}", True, f"{device.name}, {device.total_memory / GIB:.0f} GiB")


def _part(part: Part) -> Finding:
    if find_spec(part.module) is None:
        remedy = f"hflow {metadata.version('hflow')} does not have it yet"
        return Finding(part.topic, part.name, False, "not part of this version", remedy, part.required)
    absent = [package for package in part.packages if find_spec(package) is None]
    if absent:
        detail = f"needs {', '.join(absent)}"
        return Finding(part.topic, part.name, False, detail, part.install, part.required)
    return Finding(part.topic, part.name, True, "usable", required=part.required)


def _ray() -> Finding:
    """Start a small cluster in another process and run a task on it."""
    remedy = "use workers=inproc, or free memory and shared memory for Ray"
    command = [sys.executable, "-c", RAY_PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RAY_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return Finding("ray", "start", False, f"not ready after {RAY_TIMEOUT:.0f} s", remedy, required=False)
    if done.returncode == 0:
        return Finding("ray", "start", True, "starts and runs a task", required=False)
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    return Finding("ray", "start", False, last[0], remedy, required=False)
