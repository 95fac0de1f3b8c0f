"""What the processes of a run find on their machines, compared with what the plan assumes."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from hflow.errors import RunError
from hflow.planner.cluster import device_ranges
from hflow.planner.hardware import GIB
from hflow.planner.ir import ClusterSpec

MIN_MEMORY_SHARE = 0.95
"""Share of the plan's memory that a device must have. Drivers keep some of what data sheets say."""
SAME_PACKAGES = ("hflow", "torch", "transformers", "megatron-core", "vllm")
"""Distributions whose versions must be the same in all processes."""


@dataclass(frozen=True)
class ProcessDevices:
    """What one process finds."""

    host: str
    """Name of its machine."""
    names: tuple[str, ...]
    """Its CUDA devices, as other processes there name them in CUDA_VISIBLE_DEVICES; empty on CPUs."""
    kind: str
    """What the driver calls the first of them, which the process uses; empty on CPUs."""
    memory_bytes: int
    """Memory of that device."""
    problem: str
    """Why torch cannot use CUDA, in one line; empty if it can."""
    versions: tuple[tuple[str, str], ...]
    """Name and version of each of `SAME_PACKAGES` that is installed."""


def find_devices() -> ProcessDevices:
    """Return what this process finds."""
    import torch

    problem = cuda_problem()
    found = [] if problem else [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible and found else map(str, range(len(found)))
    return ProcessDevices(
        host=socket.gethostname(),
        names=tuple(names),
        kind=found[0].name if found else "",
        memory_bytes=found[0].total_memory if found else 0,
        problem=problem,
        versions=package_versions(),
    )


def package_versions() -> tuple[tuple[str, str], ...]:
    """Return name and version of each of `SAME_PACKAGES` that is installed."""
    installed = []
    for package in SAME_PACKAGES:
        try:
            installed.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(installed)


def cuda_problem() -> str:
    """Return why torch cannot use CUDA here, in one line; empty if it can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    return str(caught[-1].message).splitlines()[0] if caught else "torch finds no CUDA device"


def check_devices(
    cluster: ClusterSpec, found: Sequence[ProcessDevices], versions: Sequence[tuple[str, str]]
) -> None:
    """Check that the processes of a run are what its plan assumes.

    Args:
        cluster: of the plan.
        found: what each worker's process finds.
        versions: of the controller's packages.

    Raises:
        RunError: naming the worker, its machine, and what to change.
    """
    for worker, process in enumerate(found):
        where = f"worker {worker} on {process.host}"
        for (package, ours), theirs in ((entry, dict(process.versions).get(entry[0])) for entry in versions):
            if theirs != ours:
                raise RunError(
                    f"{where} has {f'{package} {theirs}' if theirs else f'no {package}'}, but this process "
                    f"has {package} {ours}. Install the same on all machines"
                )
        if cluster.device != "cuda":
            continue
        if process.problem:
            raise RunError(
                f"{where} cannot use a GPU: {process.problem}. There, "
                f"`hflow doctor --gpus {cluster.devices_per_node}` says how to fix it"
            )
        if process.memory_bytes < MIN_MEMORY_SHARE * cluster.memory_bytes:
            raise RunError(
                f"{where} has {process.kind} with {process.memory_bytes / GIB:.1f} GiB, but "
                f"cluster={cluster.name} assumes {cluster.memory_bytes / GIB:.1f} GiB. Set a cluster of the "
                "devices that there are"
            )
    kinds: dict[str, list[int]] = {}
    for worker, process in enumerate(found):
        kinds.setdefault(process.kind, []).append(worker)
    if cluster.device == "cuda" and len(kinds) > 1:
        listed = "; ".join(f"{kind}: worker {device_ranges(workers)}" for kind, workers in kinds.items())
        raise RunError(
            f"the workers have different GPUs ({listed}), but a plan has one kind. Use machines of one kind, "
            "or leave out the others with CUDA_VISIBLE_DEVICES"
        )
