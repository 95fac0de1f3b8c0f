"""Check hflow with the packages of a bare GPU machine, on CPUs.

    build/bare/bin/python requirements/bare.py [STEP ...]

`make bare` makes that environment: Python 3.12, torch 2.11, transformers 5.17 and what they depend on. The
wheels of `make gpu-wheels` come on top, as on the machine, and hflow is not installed. Steps are `absent`
(packages that the environment must not have), `collect` (the tests marked gpu), `run`, `doctor`, `cells` and
`tests` (a part of the unit tests). Output goes to build/bare-check.
"""

from __future__ import annotations

import argparse
import shutil
import sys

from gpu_check import ROOT, install, pytest, run

OUT = ROOT / "build" / "bare-check"
ABSENT = ("ray", "vllm", "flash_attn", "transformer_engine", "pyarrow", "datasets", "xdist")
TESTS = (
    "algo_advantages",
    "algo_losses",
    "attention_kernels",
    "backend_traits",
    "decode_graphs",
    "decode_kernels",
    "doctor_gpus",
    "engine",
    "engine_pages",
    "graph_build",
    "host_offload",
    "logit_kernels",
    "logprobs",
    "loss_reductions",
    "plan_compile",
    "plan_schedule",
    "routing_replay",
    "torch_model_checkpoint",
    "torch_model_output",
    "torch_model_training",
    "worker_inproc",
)
"""Unit tests that need no other package: engines, training, formulas, the graph and the planner."""


def commands() -> dict[str, list[str]]:
    """Return the command of each step."""
    code = f"""
from importlib.metadata import distributions
from importlib.util import find_spec
found = [name for name in {ABSENT} if find_spec(name)]
found += [one.name for one in distributions() if one.name == "hflow-rl"]
raise SystemExit(f"installed here: {{found}}" if found else 0)
"""
    hflow = [sys.executable, "-m", "hflow"]
    short = ("steps=3", "workers=inproc", "--plain", f"out={OUT / 'runs'}")
    cells = [sys.executable, "-m", "benchmarks.speed.training_cells", "--shape", "tiny"]
    files = [f"tests/unit/test_{name}.py" for name in TESTS]
    return {
        "absent": [sys.executable, "-c", code],
        "collect": pytest("-m", "gpu", "--collect-only"),
        "run": [*hflow, "run", "recipes/grpo.py", *short],
        "doctor": [*hflow, "doctor", "--gpus", "0", "--json", str(OUT / "doctor.json")],
        "cells": [*cells, "--out", str(OUT / "cells.json")],
        "tests": pytest("-m", "not ray and not long and not gpu", *files),
    }


def main() -> None:
    """Run the steps that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help="default: all")
    options = parser.parse_args()
    steps = commands()
    if unknown := set(options.steps) - set(steps):
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are {', '.join(steps)}")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    variables = {**install(), "OMP_NUM_THREADS": "1"}
    codes = [run(name, steps[name], OUT, variables) for name in options.steps or steps]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
