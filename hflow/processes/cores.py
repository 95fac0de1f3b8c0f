"""The processor cores of a process: how many it may use, and to which it is bound."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from hflow.base.errors import RunError

_ALLOWED_CORES = sorted(os.sched_getaffinity(0))
"""Cores that this process could use when it started."""


def bind_cores(cores: range) -> Callable[[], None]:
    """Bind all threads of this process, also future ones, to cores, and give torch as many threads.

    Cores are indices among those that the process may use; with none, nothing is bound. Returns a function
    that undoes it.

    Raises:
        RunError: when there are fewer cores.
    """
    if not cores:
        return lambda: None
    import torch

    chosen, num_threads = bound_cores(cores), torch.get_num_threads()
    _bind_threads(chosen)
    torch.set_num_threads(len(chosen))

    def undo() -> None:
        _bind_threads(_ALLOWED_CORES)
        torch.set_num_threads(num_threads)

    return undo


def _bind_threads(cores: Collection[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def bind_to_socket(device: int) -> None:
    """Bind all threads of this process, and processes that it starts, to the cores beside its GPU.

    Pinned memory is then on that socket too, so that copies and launches do not cross to another one. Nothing
    is bound where the system does not say which cores these are.
    """
    import torch

    if cores := socket_cores(torch.cuda.get_device_properties(device)):
        _bind_threads(cores)
        torch.set_num_threads(min(torch.get_num_threads(), len(cores)))


def socket_cores(properties: Any, devices: Path = Path("/sys/bus/pci/devices")) -> tuple[int, ...]:
    """Return the cores beside a GPU, by its torch properties, that this process may use, as far as known."""
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        ranges = (devices / bus / "local_cpulist").read_text(encoding="ascii").strip()
    except (AttributeError, OSError):
        return ()
    ends = (part.partition("-") for part in ranges.split(",") if part)
    near = {core for first, _, last in ends for core in range(int(first), int(last or first) + 1)}
    return tuple(core for core in _ALLOWED_CORES if core in near)


def allowed_cores() -> tuple[int, ...]:
    """Return the system's numbers of the cores that this process could use when it started."""
    return tuple(_ALLOWED_CORES)


def bound_cores(cores: range) -> tuple[int, ...]:
    """Return the system's numbers of cores, by their indices among those that this process started with.

    Raises:
        RunError: when there are fewer cores.
    """
    if cores.stop > len(_ALLOWED_CORES):
        raise RunError(
            f"cores binds a worker to cores {cores.start} to {cores.stop - 1}, but this process may use only "
            f"{len(_ALLOWED_CORES)} cores. Set smaller numbers, or cores=null"
        )
    return tuple(_ALLOWED_CORES[core] for core in cores)
