"""Runs scripts with Triton on CPUs. It is in `build/triton`, as vLLM's build for CPUs must not find it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "build" / "triton"

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None and not PACKAGES.is_dir(),
    reason="run make build/triton/installed",
)


def run_with_triton(script: str) -> None:
    """Run a script in a process of its own, which also finds the tests' modules."""
    paths = [str(ROOT / "tests" / "unit"), str(ROOT / "tests" / "kits"), *sys.path, str(PACKAGES)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
