"""Check hflow on a machine with GPUs, which needs neither a network nor hflow installed.

    python requirements/gpu_check.py [--gpus N] [STEP ...]

Steps are `cells` (seconds and memory of training steps beside those of the plan), `tests` (those marked gpu)
and `doctor`. Each runs whatever an earlier one has found. Packages that this Python lacks come from the
wheels of `make gpu-wheels`, where that folder is; only these steps see them. Figures and output go to the
folder $OUT, or build/gpu-check.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from hflow.base.machine_gpus import visible_gpus  # noqa: E402

WHEELS = ROOT / "build" / "gpu-wheels"
PACKAGES = ROOT / "build" / "gpu-packages"
"""Where the wheels are installed."""


def install() -> dict[str, str]:
    """Install the wheels into their own folder; return variables with which Python finds them and hflow."""
    shutil.rmtree(PACKAGES, ignore_errors=True)
    wheels = sorted(WHEELS.glob("*.whl"))
    if wheels:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--no-cache-dir", "--target", str(PACKAGES), *map(str, wheels)], check=True)
    else:
        print(f"no wheels in {WHEELS}: this Python must have what requirements/gpu.txt lists", flush=True)
    paths = [str(ROOT), str(PACKAGES), os.environ.get("PYTHONPATH", "")]
    # Plugins of pytest that the machine happens to have may not fit.
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def pytest(*arguments: str) -> list[str]:
    """Return the command that runs tests with the only plugin that they need."""
    return [sys.executable, "-m", "pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider", *arguments]


def run(name: str, command: Sequence[str], out: Path, variables: Mapping[str, str]) -> int:
    """Run a command in the checkout; show its output, which also goes to `NAME.log`. Return its exit code."""
    print(f"== {name}: {' '.join(command[1:])}", flush=True)
    environment = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
    with (
        (out / f"{name}.log").open("wb") as log,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            log.write(line)
    print(f"== {name}: exit code {process.returncode}", flush=True)
    return process.returncode


def commands(gpus: int, out: Path) -> dict[str, list[str]]:
    """Return the command of each step."""
    results = {name: str(out / name) for name in ("cells.json", "tests.xml", "doctor.json")}
    select = ("-m", "gpu", "--continue-on-collection-errors")
    return {
        "cells": [sys.executable, "-m", "benchmarks.speed.training_cells", "--out", results["cells.json"]],
        "tests": pytest(*select, "--durations", "10", "--junitxml", results["tests.xml"]),
        "doctor": [
            *(sys.executable, "-m", "hflow", "doctor"),
            *("--gpus", str(gpus), "--json", results["doctor.json"]),
        ],
    }


def main() -> None:
    """Run the steps that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, help="GPUs to use; default: all that CUDA_VISIBLE_DEVICES allows")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="cells, tests or doctor; default: all")
    options = parser.parse_args()
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-check").resolve()
    num_gpus = len(visible_gpus(os.environ)) if options.gpus is None else options.gpus
    if options.gpus is None and num_gpus == 0:
        parser.error("nvidia-smi lists no GPU that CUDA_VISIBLE_DEVICES allows; --gpus 0 tries CPUs")
    steps = commands(num_gpus, out)
    if unknown := set(options.steps) - set(steps):
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are {', '.join(steps)}")
    out.mkdir(parents=True, exist_ok=True)
    variables = install()
    codes = [run(name, steps[name], out, variables) for name in options.steps or steps]
    print(f"figures are in {out}")
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
