"""The descriptor of AdamW, which imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hflow.planner.plan.optimizers import OptimizerKind, OptimizerState, OptimizerTraits

if TYPE_CHECKING:
    from hflow.config.schema import OptimConfig

STATES = (OptimizerState("mean"), OptimizerState("square"))
"""Moving averages of the gradient and of its square, in fp32."""


def _build(groups: list[dict[str, Any]], optim: OptimConfig) -> Any:
    from hflow.training.optimizers.adamw.optimizer import GroupAdamW

    return GroupAdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


OPTIMIZER = OptimizerKind(
    name="adamw",
    summary="AdamW (Loshchilov and Hutter 2019), with moments in fp32.",
    traits=OptimizerTraits(
        states=lambda optim, is_matrix: STATES,
        # All in fp32: weight and two moments are read and written, the gradient is read (28), and is read
        # twice and written once for its norm and clipping (12).
        step_bytes=40,
        options=("betas", "eps"),
    ),
    build=_build,
)
