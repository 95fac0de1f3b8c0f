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
        # As AdamW (40). Each of two moments is cast to fp32 (6), rounded with random numbers that are changed
        # (8), added (12) and cut off (8), and cast back (6).
        step_bytes=120,
        options=("betas", "eps"),
        buffer_bytes=12,  # both moments in fp32, and random numbers
    ),
    build=_build,
)
