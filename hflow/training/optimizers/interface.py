"""`GroupOptimizer`, which updates weights, and `StepOptimizer`, the base of the backends' optimizers."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hflow.base.errors import BackendError
from hflow.config.schema import OptimConfig
from hflow.models.dtypes import DTYPES
from hflow.models.settings import ModelSettings
from hflow.planner.plan.optimizers import (
    OPTIONS,
    OptimizerState,
    check_groups,
    is_layer_matrix,
    optimizer_kind,
    optimizer_traits,
    states_of,
    weight_group,
)
from hflow.training.optimizers.learning_rate import learning_rate
from hflow.training.optimizers.whole_matrices import BlocksOf, WholeMatrices

STATE_OPTIONS = ("name", *OPTIONS)
"""The settings of `OptimConfig` on which the states of an optimizer depend."""


class NamedWeight(NamedTuple):
    """A weight of a module, and the Hugging Face tensors that it is, or that parts of it are."""

    weight: nn.Parameter
    tensors: tuple[str, ...]
    num_axes: int
    """The axes of these tensors."""


class GroupOptimizer(Protocol):
    """A `torch.optim.Optimizer` on this rank's weights, or parts of them, as plain tensors."""

    param_groups: list[dict[str, Any]]
    """Each has `params`, `lr`, `weight_decay`, `in_layers` (whether they are matrices of layers) and, after
    the first step, `step`, the number of steps made."""

    def step(self) -> None:
        """Update every weight that has a gradient."""

    def states_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return a weight's states, in the order of `OptimizerTraits.states`; allocated at the first call.

        They have the weight's shape. Where the optimizer keeps them in another form, these are copies.
        """

    def load_states(self, weight: Tensor, states: Sequence[Tensor]) -> None:
        """Take what `states_of` returned, after a checkpoint has been read into it."""


class MatrixOptimizer(GroupOptimizer, Protocol):
    """An optimizer whose updates depend on whole matrices (`OptimizerTraits.matrix_flops`)."""

    def begin_step(self) -> None:
        """Replace the gradient of each matrix of a layer by what its update depends on, in place."""

    def whole_update(self, matrices: Tensor) -> Tensor:
        """Return the updates of whole matrices `[matrices, rows, columns]`, which may be overwritten.

        Before `step`, they take the places of the gradients.
        """

    def scale(self, rows: int, columns: int) -> float:
        """Return the factor of the update of a matrix of this size."""


class StepOptimizer(abc.ABC):
    """The optimizer of a model on one rank: steps, schedule and saved state, whatever computes the update.

    Args:
        model: the model's settings, with those of the optimizer and its schedule.
    """

    def __init__(self, model: ModelSettings) -> None:
        self.optim = model.optim
        """The settings."""
        self._model, self._num_updates, self._dtype = model.name, model.num_updates, DTYPES[model.dtype]
        self._matrices: WholeMatrices | None = None
        self.num_steps = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.optim, self.num_steps, self._num_updates)

    @property
    def skips_nonfinite(self) -> bool:
        """Whether an update whose gradient is not finite is skipped."""
        return self.optim.on_nonfinite == "skip"

    def resume(self, num_steps: int) -> None:
        """Set the number of steps made, after the state of that many steps has been loaded."""
        self.num_steps = num_steps
        for group in self._param_groups():
            group["step"] = num_steps

    def _groups(self, weights: Iterable[NamedWeight], names: Collection[str]) -> list[dict[str, Any]]:
        """Return weights in groups of parameters: those of one learning rate and weight decay.

        Args:
            weights: weights of this rank.
            names: the Hugging Face names of all tensors of the model that training changes.

        Raises:
            ConfigError: if an entry of `optim.groups` matches none of the names.
            BackendError: if tensors that a weight consists of have different entries.
        """
        check_groups(f"models.{self._model}.optim", self.optim, names)
        groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
        for named in weights:
            keys = {self._group_of(tensor, named.num_axes) for tensor in named.tensors}
            if len(keys) > 1:
                raise BackendError(
                    f"models.{self._model}.optim.groups: {', '.join(named.tensors)} are one weight of the "
                    "backend, so they must have the same lr and weight_decay; change match, or use another "
                    "backend"
                )
            groups.setdefault(keys.pop(), []).append(named.weight)
        return [
            {"params": params, "base_lr": lr, "weight_decay": decay, "in_layers": in_layers}
            for (lr, decay, in_layers), params in groups.items()
        ]

    def _group_of(self, tensor: str, num_axes: int) -> tuple[float, float, bool]:
        """Return learning rate and weight decay of a tensor, and whether it is a matrix of a layer."""
        group, optim = weight_group(self.optim, tensor), self.optim
        decay = optim.weight_decay if num_axes > 1 else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        lr = optim.lr if group is None or group.lr is None else group.lr
        return lr, decay, is_layer_matrix(tensor, num_axes)

    def _build(self, groups: list[dict[str, Any]]) -> Any:
        """Return a new `GroupOptimizer` of groups that `_groups` made."""
        return optimizer_kind(self.optim.name).build(groups, self.optim)

    def _find_matrices(self, blocks: Mapping[Any, BlocksOf], group: ProcessGroup | None) -> None:
        """Find the parts of matrices that ranks hold, if the optimizer needs whole ones; a collective.

        Args:
            blocks: this rank's shards of weights, and what they consist of.
            group: the ranks that hold the parts; None for one.
        """
        if optimizer_traits(self.optim.name).needs_whole_matrix:
            self._matrices = WholeMatrices(blocks, group)

    def _update_matrices(self, optimizers: Sequence[Any]) -> None:
        """Replace the gradients of matrices by updates, if the optimizer needs whole ones; a collective.

        They are computed in the dtype of the model's passes.
        """
        if self._matrices is not None:
            for optimizer in optimizers:
                optimizer.begin_step()
            self._matrices.update(optimizers[0].whole_update, optimizers[0].scale, self._dtype)

    def _set_lr(self) -> None:
        for group in self._param_groups():
            optim = replace(self.optim, lr=group["base_lr"])
            group["lr"] = learning_rate(optim, self.num_steps, self._num_updates)

    @abc.abstractmethod
    def _param_groups(self) -> Iterable[dict[str, Any]]:
        """Yield the groups of parameters of everything that updates weights here."""


def states_at(optim: OptimConfig, tensor: str, num_axes: int) -> tuple[OptimizerState, ...]:
    """Return the states that an optimizer keeps of a tensor with this Hugging Face name."""
    return states_of(optim, is_layer_matrix(tensor, num_axes))
