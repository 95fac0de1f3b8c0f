"""`GroupOptimizer`, which updates weights, and `StepOptimizer`, the base of the backends' optimizers."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from hflow.models.settings import ModelSettings
from hflow.planner.plan.optimizers import OPTIMIZERS, optimizer_kind, optimizer_traits
from hflow.training.optimizers.learning_rate import learning_rate

DEFAULT_OPTIMIZER = OPTIMIZERS.default
"""The optimizer of checkpoints that name none."""


class GroupOptimizer(Protocol):
    """A `torch.optim.Optimizer` on this rank's weights, or parts of them, as plain tensors."""

    param_groups: list[dict[str, Any]]
    """Each has `params`, `lr`, `weight_decay` and, after the first step, `step`, the number of steps made."""

    def step(self) -> None:
        """Update every weight that has a gradient."""

    def states_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return a weight's state in the order of `OptimizerTraits.kinds`; allocate it at the first call."""


class StepOptimizer(abc.ABC):
    """The optimizer of a model on one rank: steps, schedule and saved state, whatever computes the update.

    Args:
        model: the model's settings, with those of the optimizer and its schedule.
    """

    def __init__(self, model: ModelSettings) -> None:
        self._optim, self._num_updates = model.optim, model.num_updates
        self.num_steps = 0

    @property
    def name(self) -> str:
        """The optimizer's name (`optim.name`)."""
        return self._optim.name

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self._optim, self.num_steps, self._num_updates)

    @property
    def skips_nonfinite(self) -> bool:
        """Whether an update whose gradient is not finite is skipped."""
        return self._optim.on_nonfinite == "skip"

    def resume(self, num_steps: int) -> None:
        """Set the number of steps made, after the state of that many steps has been loaded."""
        self.num_steps = num_steps
        for group in self._param_groups():
            group["step"] = num_steps

    def _build(self, groups: list[dict[str, Any]]) -> Any:
        """Return a new `GroupOptimizer` of groups that `decay_groups` made."""
        return optimizer_kind(self.name).build(groups, self._optim)

    def _set_lr(self) -> None:
        for group in self._param_groups():
            group["lr"] = self.lr

    @abc.abstractmethod
    def _param_groups(self) -> Iterable[dict[str, Any]]:
        """Yield the groups of parameters of everything that updates weights here."""


def decay_groups(weights: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return matrices, which decay, and vectors (norms, biases), which do not, as groups of parameters."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for weight in weights:
        (matrices if weight.dim() >= 2 else vectors).append(weight)
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def saved_kinds(name: str) -> tuple[str, ...]:
    """Return the kinds of state that an optimizer saves of each weight."""
    return optimizer_traits(name).kinds
