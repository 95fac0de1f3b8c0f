"""The descriptor of AdamW that steps on the CPU, which imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hflow.planner.plan.optimizers import OptimizerKind, OptimizerTraits
from hflow.training.optimizers.adamw.descriptor import STATES

if TYPE_CHECKING:
    from hflow.config.schema import OptimConfig


def _build(groups: list[dict[str, Any]], optim: OptimConfig) -> Any:
    from hflow.training.optimizers.adamw_cpu.optimizer import GroupAdamWCpu

    return GroupAdamWCpu(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


OPTIMIZER = OptimizerKind(
    name="adamw_cpu",
    summary="AdamW with moments in host memory, where the CPU computes the steps.",
    traits=OptimizerTraits(
        states=lambda optim, is_matrix: STATES,
        step_bytes=40,  # as AdamW, of which 28 are those of the host's memory
        options=("betas", "eps"),
        is_on_host=True,
    ),
    build=_build,
)
