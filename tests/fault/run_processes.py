"""The processes of a run: which there are, and which are left when it is over."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
END_SECONDS = 40.0
"""Longest time after which the processes of a run that was ended must have ended. Ray's agents look for their
raylet every few seconds, and end when it is missing five times."""

ROLES = ("worker", "reward", "raylet", "gcs", "agent")
"""Processes of a run besides its controller: workers, those that run per-sample bodies or guard them, and
Ray's own."""
BINARIES = {"raylet": "raylet", "gcs_server": "gcs"}
"""Name of a program -> its role."""


def adopt_orphans(does: bool = True) -> None:
    """Make descendants of this process that lose their parent its children, so that none is overlooked.

    Args:
        does: False: from now on, it does not.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def descendants(pid: int) -> list[psutil.Process]:
    """Return the living descendants of a process, in the order of their ids."""
    try:
        processes = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return sorted((process for process in processes if _lives(process)), key=lambda process: process.pid)


def with_role(pid: int, role: str) -> list[psutil.Process]:
    """Return the descendants of a process that have a role."""
    return [process for process in descendants(pid) if _role(process) == role]


def left_behind(ours: int | None = None) -> list[str]:
    """Wait until this process has no descendants, and return those that do not end. They are killed.

    Args:
        ours: a child that may stay.
    """
    deadline = time.monotonic() + END_SECONDS
    while True:
        _reap(ours)
        left = [process for process in descendants(os.getpid()) if process.pid != ours]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    texts = []
    for process in left:
        with suppress(psutil.Error):
            texts.append(f"{process.pid} {process.status()}: {' '.join(process.cmdline())[:200]}")
        with suppress(psutil.Error):
            process.kill()
    return texts


def shared_files(pids: set[int]) -> list[str]:
    """Return the semaphores in shared memory that these processes have left."""
    paths = Path("/dev/shm").glob("sem.hflow-*")
    return sorted(path.name for path in paths if int(path.name.split("-")[2]) in pids)


def _role(process: psutil.Process) -> str | None:
    try:
        name, command = process.name(), " ".join(process.cmdline())
    except psutil.Error:
        return None
    if name in BINARIES:
        return BINARIES[name]
    if "pool_child" in command:
        return "reward"
    if command.startswith("ray::") and "Agent" in command:
        return "agent"
    is_starting = "default_worker.py" in command
    return "worker" if is_starting or "WorkerProcess" in command or "RayWorker" in command else None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _reap(ours: int | None) -> None:
    """Remove children that have ended from the table of processes."""
    for process in psutil.Process().children():
        with suppress(psutil.Error, ChildProcessError):
            if process.pid != ours and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
