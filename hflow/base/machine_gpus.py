"""The GPUs of this machine, as the driver reports them. It needs no torch."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from hflow.base.errors import ConfigError

_QUERY = "index,uuid,name,driver_version,memory.total,memory.used,compute_mode"
_SECONDS = 60.0
"""Longest wait for `nvidia-smi`."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver reports it."""

    index: int
    """The number of this GPU for `nvidia-smi`, which counts all of the machine."""
    uuid: str
    """Begins with `GPU-`."""
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


def visible_gpus(variables: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs of `nvidia-smi` that `CUDA_VISIBLE_DEVICES` of the variables allows; none without it.

    Raises:
        ConfigError: for a CUDA_VISIBLE_DEVICES that names others, or counts different ones in CUDA's order.
    """
    gpus = read_gpus()
    chosen = variables.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not gpus:
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    found = [
        gpu
        for name in names
        for gpu in gpus
        if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
    ]
    if len(found) != len(names):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={chosen} does not name GPUs of this machine, by numbers below {len(gpus)} "
            "or by UUIDs of nvidia-smi --list-gpus; correct it"
        )
    is_counted = any(map(str.isdigit, names)) and variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    if is_counted and len({gpu.name for gpu in gpus}) > 1:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={chosen} counts GPUs that differ, and CUDA counts the fastest first; set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, with which it counts as nvidia-smi does"
        )
    return found


def parse_gpus(table: str) -> list[Gpu]:
    """Return the GPUs in nvidia-smi's table, whose memory is in MiB."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.strip()]
    return [
        Gpu(int(index), uuid, name, driver, int(total) << 20, int(used) << 20, mode)
        for index, uuid, name, driver, total, used, mode in rows
        if total.isdigit() and used.isdigit()
    ]
