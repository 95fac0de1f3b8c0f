"""The memory of this machine that its processes may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def machine_memory() -> int:
    """Return the bytes that the processes of this machine may use together.

    That is the memory of the machine or, in a container or a batch job, the smallest limit of the control
    groups that this process is in.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, *cgroup_limits(Path("/")))


def cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the memory limits of this process's control groups, and of those around them, in `root`."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = mount / path.lstrip("/")
        # In a container, the path may be that of the host, of which only the end is visible at the mount.
        for directory in (group, *group.parents):
            if not directory.is_relative_to(mount):
                break
            yield from _limit(directory / name)


def _limit(file: Path) -> Iterator[int]:
    """Yield the number in a file of a control group; nothing where there is no limit."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return
    if text.isdigit():
        yield int(text)
