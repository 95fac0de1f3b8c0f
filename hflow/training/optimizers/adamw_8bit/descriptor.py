"""The descriptor of AdamW with moments in 8 bits, which imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hflow.planner.plan.optimizers import OptimizerKind, OptimizerState, OptimizerTraits
from hflow.training.optimizers.adamw.descriptor import STATES
from hflow.training.optimizers.adamw_8bit.blocks import BLOCK

if TYPE_CHECKING:
    from hflow.config.schema import OptimConfig

_BYTES = 1 + 4 / BLOCK


def _states(optim: OptimConfig, is_matrix: bool) -> tuple[OptimizerState, ...]:
    return (OptimizerState("mean", _BYTES), OptimizerState("square", _BYTES)) if is_matrix else STATES


def _build(groups: list[dict[str, Any]], optim: OptimConfig) -> Any:
    from hflow.training.optimizers.adamw_8bit.optimizer import GroupAdamW8Bit

    return GroupAdamW8Bit(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


OPTIMIZER = OptimizerKind(
    name="adamw_8bit",
    summary="AdamW with moments of matrices in blocks of 8-bit numbers (Dettmers et al. 2022).",
    traits=OptimizerTraits(
        states=_states,
        # As AdamW (40). Each of two moments is read by way of 32 bits (9) into fp32 (8), scaled (8), read for
        # its block's scale (8), divided (8), and written by way of 32 bits (13).
        step_bytes=148,
        options=("betas", "eps"),
        buffer_bytes=16,  # both moments in fp32, and numbers of 32 bits, of which a CPU needs two
    ),
    build=_build,
)
