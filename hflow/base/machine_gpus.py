"""The GPUs of this machine, as the driver reports them. It needs no torch."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

_QUERY = "name,driver_version,memory.total,memory.used,compute_mode"
_SECONDS = 60.0
"""Longest wait for `nvidia-smi`."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver reports it."""

    name: str
    driver: str
    """Version of the driver."""
    memory_bytes: int
    used_bytes: int
    """Memory in use by any process."""
    compute_mode: str
    """Which processes may use it: `Default`, `Exclusive_Process` or `Prohibited`."""

    @property
    def memory_gib(self) -> float:
        """Size of its memory."""
        return self.memory_bytes / (1 << 30)


def read_gpus(*arguments: str) -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists, with arguments such as `--id=GPU-UUID`; none without it."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(result.stdout) if result.returncode == 0 else []


def parse_gpus(table: str) -> list[Gpu]:
    """Return the GPUs in nvidia-smi's table, whose memory is in MiB."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.strip()]
    return [
        Gpu(name, driver, int(total) << 20, int(used) << 20, mode)
        for name, driver, total, used, mode in rows
        if total.isdigit() and used.isdigit()
    ]
