"""Prepares a worker's process: environment variables, memory, garbage collection."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

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
