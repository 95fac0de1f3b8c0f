"""Trainers of two policies with adapters of SmolLM2-135M, each with weights of its own, and both on one base.

    python -m benchmarks.memory.shared_base [--dtype bf16]

`held_bytes` are the weights and optimizer states of both, each storage once, and `planned_bytes` what the
plan says of them. `process_bytes` is the resident memory that the process gains by building both.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from benchmarks.lib import harness
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.worker_setup import make_setup
from hflow.models import smollm2
from hflow.planner.forecast.memory.rank import Rank
from hflow.planner.models.descriptors import training_backend
from hflow.training.fsdp.backend import TorchModel
from hflow.workers.worker import build_backends, hosted_replicas

WAYS = {"apart": "models.bob.base_of=null", "shared": "models.bob.base_of=alice"}
COMMON = ["workers=inproc", "cluster=cpu-1x1"]


def measure(overrides: Sequence[str]) -> dict[str, Any]:
    """Build the trainers of both policies, in a process of their own."""
    torch.set_num_threads(1)
    compiled = compile_recipe("self_play", overrides)
    setup = make_setup(compiled)
    trained = [replica for replica in hosted_replicas(setup, [0]) if replica.role == "train"]
    shapes, models = dict(compiled.plan.shapes), compiled.config.models
    ranks = [Rank(one, shapes[one.model], models[one.model], 0, True, True) for one in trained]
    process = psutil.Process()
    before = process.memory_info().rss
    held: dict[int, int] = {}
    for backend in build_backends(setup, trained, None).values():
        assert isinstance(backend, TorchModel)
        assert backend._optimizer is not None
        for tensor in (*backend._runner.module.parameters(), *backend._optimizer.states()):
            tensor.sum()  # reads what is mapped from the checkpoint
            held[tensor.data_ptr()] = tensor.nbytes
    return {
        "held_bytes": sum(held.values()),
        "planned_bytes": sum(training_backend("torch").memory.model_state(rank).total() for rank in ranks),
        "process_bytes": process.memory_info().rss - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    path = smollm2.fetch("models.alice.path")
    keys = (
        f"path={path}",
        "architecture=null",
        "lora.r=16",
        "gen.max_model_len=128",
        f"dtype={options.dtype}",
    )
    models = [f"models.{name}.{key}" for name in ("alice", "bob") for key in keys]
    rows = []
    for way, key in WAYS.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(measure, ([*COMMON, *models, key],))
        rows.append({"way": way, "dtype": options.dtype} | found)
        print(rows[-1], flush=True)
    harness.write("shared-base", {"rows": rows})


if __name__ == "__main__":
    main()
