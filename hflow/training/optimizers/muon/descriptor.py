"""The descriptor of Muon, which imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hflow.planner.plan.optimizers import OptimizerKind, OptimizerState, OptimizerTraits
from hflow.training.optimizers.adamw.descriptor import STATES
from hflow.training.optimizers.muon.iterations import NUM_ITERATIONS

if TYPE_CHECKING:
    from hflow.config.schema import OptimConfig


def _matrix_flops(rows: int, columns: int) -> int:
    """Return the arithmetic of the iterations, each with three products (`orthogonalize`)."""
    short, long = sorted((rows, columns))
    return NUM_ITERATIONS * (4 * short**2 * long + 2 * short**3)


def _states(optim: OptimConfig, is_matrix: bool) -> tuple[OptimizerState, ...]:
    return (OptimizerState("momentum"),) if is_matrix else STATES


def _build(groups: list[dict[str, Any]], optim: OptimConfig) -> Any:
    from hflow.training.optimizers.muon.optimizer import GroupMuon

    return GroupMuon(
        groups,
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        momentum=0.95 if optim.momentum is None else optim.momentum,
        nesterov=optim.nesterov is not False,
    )


def _find_problem(optim: OptimConfig) -> str | None:
    if optim.nesterov and optim.momentum == 0:
        return "nesterov is true, but momentum is 0; set momentum, as in 0.95, or remove nesterov"
    return None


OPTIMIZER = OptimizerKind(
    name="muon",
    summary="Muon (Jordan et al. 2024) for matrices of layers, and AdamW for other weights.",
    traits=OptimizerTraits(
        states=_states,
        # As SGD (32), and the direction is read and the update written by what makes one from the other (8).
        step_bytes=40,
        options=("betas", "eps", "momentum", "nesterov"),
        matrix_flops=_matrix_flops,
    ),
    build=_build,
    find_problem=_find_problem,
)
