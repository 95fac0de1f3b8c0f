"""Prepares a worker's process: environment variables, processor cores, memory, garbage collection."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hflow.base.errors import RunError
from hflow.planner.models.choices import deterministic_variables
from hflow.planner.models.descriptors import descriptor
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.rows import Plan


def device_environment(plan: Plan, worker: int) -> dict[str, str]:
    """Return the environment variables of one worker.

    The backends of its replicas choose them. A plan whose runs must be equal bit for bit has more.
    """
    variables: dict[str, str] = {}
    for replica in plan.replicas:
        if worker in replica.workers:
            variables |= descriptor(replica.backend).environment(replica, plan.cluster.device)
    return variables | deterministic_variables(plan, worker)


def ray_address(cluster: ClusterSpec) -> str | None:
    """Return the address of the Ray cluster to connect to; None: Ray is started on this machine."""
    address = os.environ.get("RAY_ADDRESS", "local")
    if address != "local":
        return address
    return "auto" if cluster.num_nodes > 1 else None


_ALLOWED_CORES = sorted(os.sched_getaffinity(0))
"""Cores that this process could use when it started."""


def bind_cores(cores: range) -> None:
    """Bind all present and future threads of this process to cores, and give torch as many threads.

    Args:
        cores: indices among the cores that the process may use; empty: nothing is bound.

    Raises:
        RunError: when there are fewer cores.
    """
    if not cores:
        return
    import torch

    chosen = bound_cores(cores)
    _bind_threads(chosen)
    torch.set_num_threads(len(chosen))


def _bind_threads(cores: Collection[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def bind_to_socket(device: int) -> None:
    """Bind all threads of this process, and the processes that it starts, to the cores beside its GPU.

    Pinned memory is then on that socket too, so that copies and launches do not cross to another one. Nothing
    is bound where the system does not say which cores these are.

    Args:
        device: the GPU's index in this process.
    """
    import torch

    if cores := socket_cores(torch.cuda.get_device_properties(device)):
        _bind_threads(cores)
        torch.set_num_threads(min(torch.get_num_threads(), len(cores)))


def socket_cores(properties: Any, devices: Path = Path("/sys/bus/pci/devices")) -> tuple[int, ...]:
    """Return the cores beside a GPU that this process may use; none if they are not known.

    Args:
        properties: torch's properties of the GPU, with its place on the PCI bus.
        devices: the system's directory of PCI devices.
    """
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        ranges = (devices / bus / "local_cpulist").read_text(encoding="ascii").strip()
    except (AttributeError, OSError):
        return ()
    ends = (part.partition("-") for part in ranges.split(",") if part)
    near = {core for first, _, last in ends for core in range(int(first), int(last or first) + 1)}
    return tuple(core for core in _ALLOWED_CORES if core in near)


def num_cores() -> int:
    """Return the number of cores that this process could use when it started."""
    return len(_ALLOWED_CORES)


def bound_cores(cores: range) -> tuple[int, ...]:
    """Return the system's numbers of cores.

    Args:
        cores: indices among the cores that this process could use when it started.

    Raises:
        RunError: when there are fewer cores.
    """
    if cores.stop > len(_ALLOWED_CORES):
        raise RunError(
            f"cores binds a worker to cores {cores.start} to {cores.stop - 1}, but this process may use only "
            f"{len(_ALLOWED_CORES)} cores. Set smaller numbers, or cores=null"
        )
    return tuple(_ALLOWED_CORES[core] for core in cores)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
KEPT_FREE_BYTES = 256 << 20
LARGEST_KEPT_BYTES = 32 << 20
"""The most that glibc accepts."""


def keep_freed_memory() -> None:
    """Let this process reuse freed memory instead of returning it to the system.

    On a CPU a training step allocates and frees the same activations every time. glibc returns them to the
    system, which then clears every page again: 15 % of the CPU time of a small model. At most
    `KEPT_FREE_BYTES` stay
    with the process; allocations above `LARGEST_KEPT_BYTES` are returned as before. Variables of the
    environment that set these thresholds (`MALLOC_...`) are left alone, as are other C libraries.
    """
    is_set = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not is_set:
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES)


GC_THRESHOLDS = (20_000, 20, 50)
"""Arguments of `gc.set_threshold`. A controller holds some 100,000 objects of samples in flight, which are
freed without the collector's help. At Python's own thresholds the collector visits all of them several times
a step, for 0.1 s each time."""


def free_device_bytes() -> int | None:
    """Return the free memory of this process's GPU; None if it uses none."""
    import torch

    return torch.cuda.mem_get_info()[0] if torch.cuda.is_initialized() else None


def used_memory_bytes() -> int:
    """Return the memory in use on this process's GPU, by all processes.

    Without a GPU, it is the largest resident memory of this process so far; 0 where the system does not say.
    """
    import torch

    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        return int(total - free)
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def freeze_gc() -> None:
    """Exclude all existing objects from garbage collection, and let it run less often.

    Episodes allocate enough for several full collections a step. Each would visit the half a million objects
    of torch and transformers, which takes more time than the episodes themselves.
    """
    gc.unfreeze()  # objects that an earlier run in this process froze
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
