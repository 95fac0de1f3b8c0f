"""The memory that processes may use: limits of control groups, version 1 and 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hflow.base.machine_memory import cgroup_limits, machine_memory


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, []),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, []),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000\n"}, [1000]),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/memory.max": "500\n",
                "sys/fs/cgroup/job/step/memory.max": "max\n",
                "sys/fs/cgroup/memory.max": "1000\n",
            },
            [500, 1000],
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/docker/1\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "700\n",
            },
            [700],
        ),
    ],
)
def test_limits_of_all_groups_around_the_process_count(
    tmp_path: Path, files: dict[str, str], limits: list[int]
) -> None:
    write(tmp_path, files)
    assert list(cgroup_limits(tmp_path)) == limits


def test_it_is_at_most_that_of_the_machine() -> None:
    assert 0 < machine_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
