"""`check_zero_stages` refuses stages of ZeRO that would change nothing."""

from __future__ import annotations

from collections.abc import Container

from hflow.base.errors import PlanError
from hflow.config.schema import ModelConfig
from hflow.graph.queries import root_stream
from hflow.planner.forecast.memory.parts import largest_microbatch
from hflow.planner.plan.request import PlanRequest, stream_workloads
from hflow.planner.plan.rows import Plan, Replica
from hflow.planner.plan.traits import first_with, traits


def check_zero_stages(plan: Plan, request: PlanRequest, free: Container[str]) -> None:
    """Check that each stage below 3 is one that its replica's ranks and micro-batches can have.

    The planner chose the keys in `free`, or may choose them.

    Raises:
        PlanError: for a stage without an effect.
    """
    for replica in plan.replicas:
        config, key = request.model(replica.model), f"models.{replica.model}.zero_stage"
        if replica.role != "train" or config.zero_stage == ModelConfig().zero_stage or key in free:
            continue
        text = f"{key} is {config.zero_stage}, but"
        if not traits(replica.backend).shards_weights:
            raise PlanError(
                f"{text} the {replica.backend} backend shards optimizer states alone; remove it, or set "
                f"models.{replica.model}.backend={first_with('shards_weights')}"
            )
        if replica.layout.fsdp_size == 1:
            raise PlanError(
                f"{text} no ranks of {replica.name} divide weights with layout {replica.layout}; remove it"
            )
        if config.zero_stage == 1 and not _has_several_microbatches(plan, request, replica):
            raise PlanError(
                f"{text} a rank of {replica.name} has one micro-batch per minibatch, so that gradients "
                f"are summed over ranks once with 2 as well; set {key}=2"
            )


def _has_several_microbatches(plan: Plan, request: PlanRequest, replica: Replica) -> bool:
    """Return whether samples of the greatest length fill several micro-batches of any train node."""
    workloads, config = dict(stream_workloads(plan, request)), request.model(replica.model)
    nodes = [node for node in plan.graph.nodes if replica.model in node.spec.writes_weights]
    return any(
        largest_microbatch(
            plan, node, workloads[root_stream(plan.graph, node).name], config, replica.layout.data
        ).num
        > 1
        for node in nodes
        if node.spec.verb == "train"
    )
