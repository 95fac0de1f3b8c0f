"""Names of the optimizers, the traits that tell them apart, and which weights they treat alike.

To add one, write `descriptor.py` in `training/optimizers/NAME`, and add one line to `OPTIMIZERS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from hflow.base.errors import ConfigError
from hflow.base.registry import Registry
from hflow.config.schema import OptimConfig, WeightGroupConfig

_FOLDER = "hflow.training.optimizers"
_OWN = ("adamw", "adamw_8bit", "adamw_bf16", "adamw_cpu", "muon", "sgd")
OPTIMIZERS = Registry(
    "optimizer", "hflow.optimizers", {name: f"{_FOLDER}.{name}.descriptor:OPTIMIZER" for name in _OWN}
)
"""The optimizers, each with its descriptor."""

OPTIONS = ("betas", "eps", "momentum", "nesterov")
"""The settings of `OptimConfig` that only some optimizers have (`OptimizerTraits.options`)."""
CHUNK, CPU_CHUNK = 8 << 20, 1 << 17
"""Most entries of a weight that are updated at once, where that needs memory for each of them: on a GPU many,
so that it waits for no launch, and on a CPU what its caches hold."""
_NOT_OF_LAYERS = ("*embed*", "*lm_head.weight", "score.weight", "value_head.*")


@dataclass(frozen=True)
class OptimizerState:
    """A tensor that an optimizer keeps for each weight, in the weight's shape."""

    name: str
    """The kind of value that it is, under which sharded checkpoints have it."""
    num_bytes: float = 4
    """Bytes for each entry of the weight."""
    saved_bytes: int = 4
    """Bytes of an entry in a checkpoint."""


@dataclass(frozen=True)
class OptimizerTraits:
    """What an optimizer keeps and costs."""

    states: Callable[[OptimConfig, bool], tuple[OptimizerState, ...]]
    """Settings, and whether a weight is a matrix of a layer (`is_layer_matrix`) -> the weight's states."""
    step_bytes: int
    """Memory traffic of a step per weight, with the gradient's norm and clipping, in bytes."""
    options: tuple[str, ...] = ()
    """The names in `OPTIONS` that it has. Others are refused."""
    buffer_bytes: int = 0
    """Memory for each entry that is updated at once of the weights whose states are not fp32, in bytes."""
    is_on_host: bool = False
    """Whether states are in the memory of a GPU's host, which computes the steps."""
    matrix_flops: Callable[[int, int], int] | None = None
    """Rows, columns -> arithmetic of the update of a matrix of a layer that depends on it as a whole
    (`MatrixOptimizer`); None: updates do not."""

    @property
    def needs_whole_matrix(self) -> bool:
        """Whether updates of matrices of layers depend on each matrix as a whole."""
        return self.matrix_flops is not None


@dataclass(frozen=True)
class OptimizerKind:
    """Everything that hflow must know about an optimizer outside its own package."""

    name: str
    traits: OptimizerTraits
    summary: str
    """What it is, in a sentence."""
    build: Callable[[list[dict[str, Any]], Any], Any]
    """Groups of parameters, `OptimConfig` -> a `GroupOptimizer` (`training/optimizers/interface.py`)."""
    find_problem: Callable[[OptimConfig], str | None] = lambda optim: None
    """Returns why settings do not fit each other, and the fix."""


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


def is_layer_matrix(name: str, num_axes: int) -> bool:
    """Return whether a tensor is a matrix of a layer, or has those of its experts.

    Embeddings, output matrices, scalar heads and the kernels of convolutions are none. `name` is the Hugging
    Face name; there are 3 axes in stacked experts.
    """
    return num_axes in (2, 3) and not any(fnmatchcase(name, pattern) for pattern in _NOT_OF_LAYERS)


def states_of(optim: OptimConfig, is_matrix: bool) -> tuple[OptimizerState, ...]:
    """Return the states that an optimizer keeps of a weight."""
    return optimizer_traits(optim.name).states(optim, is_matrix)


def weight_group(optim: OptimConfig, name: str) -> WeightGroupConfig | None:
    """Return the first entry of `optim.groups` that matches a Hugging Face name."""
    return next((group for group in optim.groups if fnmatchcase(name, group.match)), None)


def with_own_options(optim: OptimConfig, given: Collection[str]) -> OptimConfig:
    """Return settings with the defaults of options that the optimizer has not, but for those in `given`."""
    kept, default = {*optimizer_traits(optim.name).options, *given}, OptimConfig()
    return replace(optim, **{name: getattr(default, name) for name in OPTIONS if name not in kept})


def check_options(key: str, optim: OptimConfig) -> None:
    """Check that an optimizer has the options that are set, and that they fit each other.

    Raises:
        ConfigError: for the first that it has not, or that changes nothing.
    """
    kind, default = optimizer_kind(optim.name), OptimConfig()
    for name in OPTIONS:
        if name not in kind.traits.options and getattr(optim, name) != getattr(default, name):
            owners = [repr(other) for other in OPTIMIZERS if name in optimizer_traits(other).options]
            unset = json.dumps(getattr(default, name))
            raise ConfigError(
                f"{key}.{name} is set, but the optimizer {optim.name!r} has no such option; remove it, or "
                f"set it to its default, {unset}, or {key}.name to {' or '.join(owners)}"
            )
    if problem := kind.find_problem(optim):
        raise ConfigError(f"{key}.{problem}")
    for number, group in enumerate(optim.groups):
        if group.lr is None and group.weight_decay is None:
            raise ConfigError(
                f"{key}.groups[{number}] matches {group.match!r}, but changes nothing; set its lr or "
                "weight_decay, or remove it"
            )


def check_groups(key: str, optim: OptimConfig, names: Collection[str]) -> None:
    """Check that each entry of `optim.groups` is the first one that matches some trained tensor.

    `names` are the Hugging Face names of all tensors that training changes.

    Raises:
        ConfigError: for the first entry that is not.
    """
    used = [weight_group(optim, name) for name in names]
    for number, group in enumerate(optim.groups):
        if not any(group is other for other in used):
            is_shadowed = any(fnmatchcase(name, group.match) for name in names)
            reason = "only tensors of earlier entries" if is_shadowed else "no tensor that is trained"
            raise ConfigError(
                f"{key}.groups[{number}].match is {group.match!r}, which matches {reason}; names are as in "
                f"{_example(names)}"
            )


def _example(names: Iterable[str]) -> str:
    """Return a name of a layer's tensor, or any."""
    return next((name for name in names if ".layers." in name), next(iter(names), "no tensor"))
