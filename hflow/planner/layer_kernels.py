"""`layer_choices`: the kernels of the layers of each replica, where there is a choice, for the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hflow.planner.ir import LayerChoice, Plan, Replica
from hflow.planner.request import PlanRequest
from hflow.planner.traits import traits
from hflow.types.layer_kernels import LayerKernels, choose_kernels, unsupported


def layer_choices(replicas: Iterable[Replica], request: PlanRequest) -> tuple[LayerChoice, ...]:
    """Return the kernels of each replica with the reason for them, as the packages of this machine allow."""
    return tuple(_choice(replica, request) for replica in replicas if traits(replica.backend).chooses_kernels)


def _choice(replica: Replica, request: PlanRequest) -> LayerChoice:
    config, installed = request.model(replica.model), request.transformer_engine
    kernels, why = choose_kernels(config.kernels, request.cluster.device, config.compute_dtype, installed)
    of_te = installed if kernels is LayerKernels.TRANSFORMER_ENGINE else None
    return LayerChoice(replica.name, kernels, of_te.version if of_te else None, why)


def layer_reasons(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield models that Transformer Engine is to compute and does not. Packages are checked by a run."""
    of_te = (c.replica for c in plan.layers if c.kernels is LayerKernels.TRANSFORMER_ENGINE)
    for model in dict.fromkeys(plan.replica(name).model for name in of_te):
        if problem := unsupported(plan.cluster.device, request.model(model).compute_dtype):
            key = f"models.{model}.kernels"
            yield f"{key} is {LayerKernels.TRANSFORMER_ENGINE}, but {problem}. Set {key}=torch."
