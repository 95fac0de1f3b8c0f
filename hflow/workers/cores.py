"""Binds this process to processor cores of its own."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hflow.errors import RunError

_ALLOWED = sorted(os.sched_getaffinity(0))
"""Cores that this process might use when it began."""


def bind_cores(cores: range) -> None:
    """Let all threads of this process, those to come too, run on these cores only, torch on as many threads.

    Args:
        cores: counted among those that the process may use; empty: nothing is bound.

    Raises:
        RunError: when there are not so many.
    """
    if not cores:
        return
    if cores.stop > len(_ALLOWED):
        raise RunError(
            f"a worker is to be bound to cores {cores.start} to {cores.stop - 1}, but this machine lends "
            f"{len(_ALLOWED)}; name fewer in cores, or none"
        )
    chosen = [_ALLOWED[core] for core in cores]
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), chosen)
    torch.set_num_threads(len(chosen))
