"""Resident memory of processes, and ranks in fresh processes whose peaks are measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 2**20
SEPARATE_TENSORS = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Environment in which every tensor is a mapping of its own: resident bytes are live bytes."""
TIMEOUT = 1200.0


def resident(*keys: str) -> int:
    """Bytes of this process by the kernel's figures: `VmRSS`, `VmHWM`, `RssAnon`, `RssShmem`, `RssFile`."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return sum(int(line[1]) * 1024 for line in lines if line[0].rstrip(":") in keys)


def reset_peak() -> None:
    """Begin `VmHWM` anew, from what is resident."""
    Path("/proc/self/clear_refs").write_text("5")


def run_ranks(module: str, options: Sequence[str], num: int, env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run a module as every rank, `--rank N`, in fresh processes; each one's last line, an object in JSON."""
    command = [sys.executable, "-m", module, *options, "--rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(num)
    ]
    outputs = [rank.communicate(timeout=TIMEOUT)[0] for rank in ranks]
    return [json.loads(text.splitlines()[-1]) for text in outputs]
