"""Helpers to run small recipes for real."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

from hflow import launch
from hflow.report.summary import RunSummary
from hflow.runtime.metrics import read_metrics

ROOT = Path(__file__).parents[2]
TINY = [
    "+model@models.actor=tiny-qwen2",
    "+data@data.train=addition",
    "models.actor.path=null",
    "nodes.actor_gen.max_tokens=4",
]


def run(recipe: str | Path, out: Path, *overrides: str) -> RunSummary:
    return launch.run(ROOT / recipe, [f"out={out}", *overrides], live=False)


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
