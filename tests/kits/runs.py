"""Runs of small recipes with real workers, and their metrics and weights."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.run_recipe import RunEnvironment, run_compiled
from hflow.runtime.records.run_summary import RunSummary
from hflow.runtime.saving.run_directory import read_metrics
from hflow.workers.ray.ray_actors import RayActors

ROOT = Path(__file__).parents[2]
TINY = [
    "+model@models.actor=tiny-qwen2",
    "+data@data.train=addition",
    "models.actor.path=null",
    "nodes.actor_gen.max_tokens=4",
]
FEWEST_PROCESSES = 4
"""Enough for all tests but the CPU twins."""


def run(recipe: str | Path, out: Path, *overrides: str, processes: RayActors | None = None) -> RunSummary:
    """Run a recipe as `hflow run` does, in these worker processes or in some of its own."""
    compiled = compile_recipe(ROOT / recipe, [f"out={out}", *overrides])
    return run_compiled(compiled, False, RunEnvironment(processes=processes))


class SharedProcesses:
    """Worker processes that tests share: to start them is most of what a small run takes.

    While they exist, no test can start Ray itself.
    """

    def __init__(self) -> None:
        self._processes: RayActors | None = None
        self._num = 0

    def take(self, num_workers: int) -> RayActors:
        """Return at least this many processes, those that exist if they are enough."""
        if self._num < num_workers:
            self.close()
            self._num = max(num_workers, FEWEST_PROCESSES)
            cluster = compile_recipe(ROOT / "recipes/sft.py", [f"cluster=cpu-1x{self._num}"]).plan.cluster
            self._processes = RayActors(cluster, is_shared=True)
            self._processes.start()
        assert self._processes is not None
        return self._processes

    def close(self) -> None:
        """End the processes, and Ray."""
        if self._processes is not None:
            asyncio.run(self._processes.close())
        self._processes, self._num = None, 0


def steps_of(summary: RunSummary) -> list[dict[str, Any]]:
    """Return the metrics of each step. There must be some, or what a test asserts of each says nothing."""
    rows = [row for row in read_metrics(summary.directory / "metrics.jsonl") if "time/step_seconds" in row]
    assert rows or not summary.steps
    return rows


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
