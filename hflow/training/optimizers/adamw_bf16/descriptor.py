"""The descriptor of AdamW with moments in bf16, which imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hflow.planner.plan.optimizers import OptimizerKind, OptimizerState, OptimizerTraits

if TYPE_CHECKING:
    from hflow.config.schema import OptimConfig

STATES = (OptimizerState("mean", 2, 2), OptimizerState("square", 2, 2))


def _build(groups: list[dict[str, Any]], optim: OptimConfig) -> Any:
    from hflow.training.optimizers.adamw_bf16.optimizer import GroupAdamWBf16

    return GroupAdamWBf16(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


OPTIMIZER = OptimizerKind(
    name="adamw_bf16",
    summary="AdamW with moments in bf16, rounded stochastically.",
    traits=OptimizerTraits(
        states=lambda optim, is_matrix: STATES,
        # As AdamW (40). Two moments are also cast to fp32, rounded with random numbers, and cast back.
        step_bytes=88,
        options=("betas", "eps"),
        buffer_bytes=14,  # both moments in fp32, random numbers, and on a CPU these as 32 bits
    ),
    build=_build,
)
