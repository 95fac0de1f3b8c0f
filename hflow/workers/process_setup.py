"""Environment variables that a worker's process needs before it touches its device."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

from hflow.errors import RunError
from hflow.planner.backends import descriptor
from hflow.planner.ir import Plan


def environment(plan: Plan, worker: int) -> dict[str, str]:
    """Return the environment variables of one worker, which the backends of its replicas choose."""
    variables: dict[str, str] = {}
    for replica in plan.replicas:
        if worker in replica.workers:
            variables |= descriptor(replica.backend).environment(replica, plan.cluster.device)
    return variables


# -------------------- Binds this process to processor cores of its own.


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


# -------------------- Keeps Python's garbage collector from walking through the libraries in every step.


THRESHOLDS = (20_000, 20, 50)
"""Objects that are made before the collector looks at the young ones, and how often it then looks at older
ones. A controller holds some hundred thousand objects of samples in flight, which it lets go without the
collector's help; at Python's own thresholds all were visited several times a step, 0.1 s each time."""


def freeze_gc() -> None:
    """Take everything that exists now out of the collector's sight, and let it look at the rest less often.

    Episodes allocate enough for several full collections a step, each of which would visit the half
    a million objects of torch and transformers: more time than the episodes themselves take.
    """
    gc.unfreeze()  # what an earlier run in this process left
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
