"""Environment variables that a worker's process needs before it touches its device."""

from __future__ import annotations

from hflow.plan.ir import Plan, Replica

ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Hardware queues of a device, read when CUDA starts. With one, kernels run in the order in which the host
issues them, so that megatron's collectives of tensor ranks begin before the products that they overlap
with. FSDP2 wants the usual several, so it is set only where it must be."""


def environment(plan: Plan, worker: int) -> dict[str, str]:
    """What is set for one worker, by the replicas that it hosts."""
    hosted = [replica for replica in plan.replicas if worker in replica.workers]
    if plan.cluster.device == "cuda" and any(map(_overlaps_tensor_ranks, hosted)):
        return {ONE_QUEUE: "1"}
    return {}


def _overlaps_tensor_ranks(replica: Replica) -> bool:
    return replica.backend == "megatron" and replica.layout.tensor > 1
