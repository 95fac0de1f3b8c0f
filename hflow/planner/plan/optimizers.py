"""Names of the optimizers, and the traits that tell them apart.

To add one, write `descriptor.py` in `training/optimizers/NAME`, and add one line to `OPTIMIZERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from hflow.base.registry import Registry

OPTIMIZERS = Registry(
    "optimizer", "hflow.optimizers", {"adamw": "hflow.training.optimizers.adamw.descriptor:OPTIMIZER"}
)
"""The optimizers, each with its descriptor."""


@dataclass(frozen=True)
class OptimizerTraits:
    """What an optimizer keeps and costs."""

    kinds: tuple[str, ...]
    """Kinds of state that it keeps for each weight: fp32 tensors of the weight's shape, vectors included.
    Sharded checkpoints have them under these names."""
    step_bytes: int
    """Memory traffic of a step per weight, with the gradient's norm and clipping, in bytes."""
    needs_whole_matrix: bool = False
    """Whether an update needs a matrix as a whole, so that one rank must hold the whole model."""


@dataclass(frozen=True)
class OptimizerKind:
    """Everything that hflow must know about an optimizer outside its own package."""

    name: str
    traits: OptimizerTraits
    build: Callable[[list[dict[str, Any]], Any], Any]
    """Groups of parameters, matrices first and then vectors, and `OptimConfig` -> a new `GroupOptimizer`
    (`training/optimizers/interface.py`)."""


@cache
def optimizer_kind(name: str) -> OptimizerKind:
    """Return the descriptor of an optimizer.

    Raises:
        PlanError: for an unknown name.
    """
    return OPTIMIZERS.describe(name, OptimizerKind)


def optimizer_traits(name: str) -> OptimizerTraits:
    """Return the traits of an optimizer.

    Raises:
        PlanError: for an unknown name.
    """
    return optimizer_kind(name).traits
