"""Runs of small recipes with real workers, and their metrics and weights."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

from hflow.launch.compile import compile_recipe
from hflow.launch.run_recipe import RunEnvironment, run_compiled
from hflow.report.summary import RunSummary
from hflow.runtime.execution.metrics_log import read_metrics
from hflow.workers.ray.ray_actors import RayActors

ROOT = Path(__file__).parents[2]
TINY = [
    "+model@models.actor=tiny-qwen2",
    "+data@data.train=addition",
    "models.actor.path=null",
    "nodes.actor_gen.max_tokens=4",
]


def run(recipe: str | Path, out: Path, *overrides: str, processes: RayActors | None = None) -> RunSummary:
    """Run a recipe as `hflow run` does, in these worker processes or in some of its own."""
    compiled = compile_recipe(ROOT / recipe, [f"out={out}", *overrides])
    return run_compiled(compiled, False, RunEnvironment(processes=processes))


@contextmanager
def worker_processes(num_workers: int) -> Iterator[RayActors]:
    """Worker processes for several runs: to start them is most of what a small run takes."""
    cluster = compile_recipe(ROOT / "recipes/sft.py", [f"cluster=cpu-1x{num_workers}"]).plan.cluster
    made = RayActors(cluster)
    made.start()
    try:
        yield made
    finally:
        asyncio.run(made.close())


def steps_of(summary: RunSummary) -> list[dict[str, Any]]:
    return [row for row in read_metrics(summary.directory / "metrics.jsonl") if "time/step_seconds" in row]


def weights_of(summary: RunSummary, model: str = "actor") -> dict[str, torch.Tensor]:
    return load_file(summary.directory / "checkpoints" / "latest" / model / "model.safetensors")


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def module(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
