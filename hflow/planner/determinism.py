"""What `deterministic=true` means for a plan: environment variables of workers, and what it does not cover.

Two runs of such a plan with the same versions are equal bit for bit, as far as libraries allow. Workers also
turn on torch's deterministic algorithms (`hflow.workers.torch_determinism`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hflow.planner.descriptors import Variation, descriptor
from hflow.planner.ir import ClusterSpec, Plan, Replica
from hflow.planner.request import PlanRequest

CUDA_VARIABLES = {
    # cuBLAS otherwise chooses between workspaces, and with them the order of sums. Read when CUDA starts.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL otherwise chooses for each collective by size and ranks, and among others sums inside of switches.
    # Each collective has a ring, and every device can use the simple protocol.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
"""Environment variables of every worker on CUDA."""


def deterministic_variables(plan: Plan, worker: int) -> dict[str, str]:
    """Return the environment variables that one worker needs so that runs are equal; none on CPUs."""
    if not plan.deterministic or plan.cluster.device != "cuda":
        return {}
    variables = dict(CUDA_VARIABLES)
    for replica in plan.replicas:
        if worker in replica.workers:
            variables |= descriptor(replica.backend).deterministic_variables
    return variables


def determinism_warnings(replicas: Iterable[Replica], request: PlanRequest) -> Iterator[str]:
    """Yield the replicas whose results may differ between two runs although they should not."""
    if request.deterministic:
        for replica, variation in _variations(replicas, request.cluster):
            yield (
                f"deterministic=true does not cover {replica.name}: {variation.reason}. Set "
                f"models.{replica.model}.{variation.setting}."
            )


def _variations(replicas: Iterable[Replica], cluster: ClusterSpec) -> Iterator[tuple[Replica, Variation]]:
    for replica in replicas:
        variation = descriptor(replica.backend).find_variation(cluster.device)
        if variation is not None:
            yield replica, variation


def determinism_line(plan: Plan) -> str:
    """Describe how two runs of the plan are made equal; empty if they need not be."""
    if not plan.deterministic:
        return ""
    others = [replica.name for replica, _ in _variations(plan.replicas, plan.cluster)]
    equal = "two runs are equal bit for bit" + (f", except by {', '.join(others)}" if others else "")
    if plan.cluster.device != "cuda":
        return (
            f"{equal}, for any number of threads: products of matrices in a fixed order, and torch refuses "
            "operations that it cannot repeat"
        )
    variables: dict[str, str] = {}
    for worker in range(plan.cluster.num_devices):
        variables |= deterministic_variables(plan, worker)
    settings = " ".join(f"{name}={value}" for name, value in variables.items())
    return f"{equal}: torch's deterministic algorithms, {settings}"
