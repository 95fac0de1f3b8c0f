"""The descriptor of AdamW, which imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hflow.planner.plan.optimizers import OptimizerKind, OptimizerTraits

if TYPE_CHECKING:
    from hflow.config.schema import OptimConfig


def _build(groups: list[dict[str, Any]], optim: OptimConfig) -> Any:
    from hflow.training.optimizers.adamw.optimizer import GroupAdamW

    return GroupAdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


OPTIMIZER = OptimizerKind(
    name="adamw",
    traits=OptimizerTraits(
        kinds=("mean", "square"),  # moving averages of the gradient and of its square
        # All in fp32: weight and two moments are read and written, the gradient is read (28), and is read
        # twice and written once for its norm and clipping (12).
        step_bytes=40,
    ),
    build=_build,
)
