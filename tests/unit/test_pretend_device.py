"""The cases of `pretend_device_cases.py`, in a process of their own.

The pretend accelerator must be added to torch before the first backward pass, and stays until the process
ends.
"""

import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("pretend_device_cases.py")


def test_backends_engine_and_a_run_work_on_the_pretend_accelerator():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:]  # also if no case was found
