"""The descriptor of SGD, which imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hflow.planner.plan.optimizers import OptimizerKind, OptimizerState, OptimizerTraits

if TYPE_CHECKING:
    from hflow.config.schema import OptimConfig


def _states(optim: OptimConfig, is_matrix: bool) -> tuple[OptimizerState, ...]:
    return (OptimizerState("momentum"),) if optim.momentum else ()


def _build(groups: list[dict[str, Any]], optim: OptimConfig) -> Any:
    from hflow.training.optimizers.sgd.optimizer import GroupSGD

    return GroupSGD(groups, lr=optim.lr, momentum=optim.momentum or 0.0, nesterov=bool(optim.nesterov))


def _find_problem(optim: OptimConfig) -> str | None:
    if optim.nesterov and not optim.momentum:
        return "nesterov is true, but sgd has no momentum; set momentum, as in 0.9, or remove nesterov"
    return None


OPTIMIZER = OptimizerKind(
    name="sgd",
    summary="Stochastic gradient descent, with momentum (Sutskever et al. 2013).",
    traits=OptimizerTraits(
        states=_states,
        # As AdamW: the weight and a momentum are read and written, the gradient is read (20), the weight is
        # multiplied by its decay (8), and norm and clipping (12).
        step_bytes=40,
        options=("momentum", "nesterov"),
    ),
    build=_build,
    find_problem=_find_problem,
)
